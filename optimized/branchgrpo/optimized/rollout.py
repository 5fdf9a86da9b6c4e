"""Growing all trees of all prompts, many parents a denoiser call (spec: rollout)."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from branchgrpo.optimized.ahead import Draws
from branchgrpo.optimized.denoiser import FiniteLog, Place, velocity
from branchgrpo.optimized.frontier import Frontier, Ready
from branchgrpo.optimized.fused import advance
from branchgrpo.optimized.growth import Growth, Step, shared_growth
from branchgrpo.optimized.noise import Places
from branchgrpo.optimized.ranks import Ranks, Share
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.optimized.store import Store
from branchgrpo.optimized.tree import Tree
from branchgrpo.reference.errors import InputError, PlanError
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, NoiseRole, Prompt, VelocityModel

COMPILE_FROM = 2**18
"""Elements from which a compiled step is used where it is allowed: below, entering it costs more than it saves."""


class Grower:
    """One rollout in progress: a growth, its storage and its frontier."""

    def __init__(
        self,
        growth: Growth,
        prompts: Sequence[Prompt],
        condition: Condition,
        sampling: Sampling,
        share: Share | None = None,
    ) -> None:
        check_prompts(prompts, condition)
        self.growth, self.condition, self.sampling, self.share = growth, condition, sampling, share
        self.calls = 0
        self.prompts = tuple(prompts)
        ids = torch.tensor([prompt.id for prompt in prompts], dtype=torch.int64)
        self.places = Places(ids, growth.roots, sampling.device)
        self.noise = Draws(growth, self.places, sampling, whole=share is None)
        self.gathered: tuple[tuple[tuple[int, int, int], ...], Condition] | None = None
        self.store = Store(growth, prompts, sampling)
        self.sizes = [len(states) for states in self.store.states]
        self.sigmas = level_sigmas(growth, self.sizes, sampling)
        self.elements = math.prod(sampling.latent_shape)
        self.frontier = Frontier(sampling.chunk)
        self.finite = FiniteLog(sampling.dtype)
        self.narrow = torch.finfo(sampling.storage_dtype).max < torch.finfo(sampling.dtype).max

    def plant(self) -> None:
        """Draw and store the roots' initial noise.  Clause: ROLL-1."""
        count = self.sizes[0]
        self.store.states[0].copy_(self.noise.take(NoiseRole.ROOT, 0, 0, count))
        self.push(0, 0, count)

    def push(self, level: int, first: int, last: int) -> None:
        """Make a range wait for its velocity, if a step leaves its level; of a shared level, this rank's part of it."""
        if not self.growth.outgoing[level]:
            return
        if self.share is not None and self.growth.levels[level].depth == self.share.depth:
            owned = self.share.owned(self.sizes[level])
            first, last = max(first, owned.start), min(last, owned.stop)
        if first < last:
            self.frontier.push(level, first, last)

    def take_step(
        self, step: Step, ready: Ready, x: Float[Tensor, "items *latent"], v: Float[Tensor, "items *latent"]
    ) -> None:
        """Grow and store the children of one range along one step.  Clause: ROLL-1, ROLL-5, LOGP-3."""
        coefficients, factor, s = step.coefficients, step.branching, self.sampling
        noise = self.noise.children(step, ready.first, ready.last) if coefficients.std > 0 else None
        fast = s.compile and len(x) * factor * self.elements >= COMPILE_FROM
        first, last = ready.first * factor, ready.last * factor
        children = self.store.room(step.target, first, last)
        mean, distance = advance(x, v, noise, coefficients, children, compile=fast)
        self.store.write(step.target, first, last, children, distance, mean)
        if noise is None and self.narrow:
            self.finite.record([self.place(ready.level, ready.first, ready.last, stored=True)], children)
        self.push(step.target, first, last)

    def conditions(self, ranges: Sequence[Ready], items: int) -> Condition:
        """The condition of every item of a call, padding last; levels of one width in a row share it."""
        spans = (*((self.growth.levels[r.level].width, r.first, r.last) for r in ranges), (items, 0, 0))
        if self.gathered is None or self.gathered[0] != spans:
            rows = joined([self.places.prompt_rows(*span) for span in spans[:-1]])
            rows = joined([rows, rows[-1:].expand(items - len(rows))]) if len(rows) < items else rows
            self.gathered = (spans, self.condition.gather(rows))
        return self.gathered[1]

    def velocities(self, model: VelocityModel, ranges: Sequence[Ready]) -> tuple[Tensor, Tensor]:
        """States and velocities of some ready ranges, one call; padded to the capacity if asked.  Clause: ROLL-3."""
        s = self.sampling
        kept = [self.store.states[r.level][r.first : r.last] for r in ranges]
        if self.store.away:  # joined on the device: the copies to the CPU are still under way
            kept = [part.to(s.device, non_blocking=True) for part in kept]
        x = joined(kept).to(s.device, s.dtype, non_blocking=True)
        sigma = joined([self.sigmas[r.level][r.first : r.last] for r in ranges])
        count, total = len(x), s.chunk if s.pad and s.chunk is not None else len(x)
        given = (x, sigma)
        if count < total:
            given = (
                torch.cat([x, x[-1:].expand(total - count, *x.shape[1:])]),
                torch.cat([sigma, sigma[-1:].expand(total - count)]),
            )
        v = velocity(model, *given, self.conditions(ranges, total), self.growth.levels[ranges[0].level].depth)
        self.calls += 1
        return x, v[:count] if count < total else v

    def call(self, model: VelocityModel) -> None:
        """One denoiser call for the next ready items, and all steps that leave them."""
        ranges = self.frontier.take()
        x, v = self.velocities(model, ranges)
        first = 0
        for ready in ranges:
            last = first + ready.last - ready.first
            x_part, v_part = (x, v) if len(ranges) == 1 else (x[first:last], v[first:last])
            first, steps = last, self.growth.outgoing[ready.level]
            if all(step.coefficients.std == 0.0 for step in steps):
                self.finite.record([self.place(ready.level, ready.first, ready.last)], v_part)
            for step in steps:
                self.take_step(step, ready, x_part, v_part)

    def place(self, level: int, first: int, last: int, *, stored: bool = False) -> Place:
        """A range of a level, for messages; ``stored`` if these are about the children's storage."""
        spec, dtype = self.growth.levels[level], self.sampling.storage_dtype
        return Place(spec.depth, spec.width, self.growth.roots, range(first, last), dtype if stored else None)

    def judge_stochastic_steps(self) -> None:
        """Which parents of stochastic steps are at fault, told by their children's distances from the mean.

        One that is infinite is a child that overflowed; any other that is not finite is the velocity's.
        """
        for step in self.growth.steps:
            distance = self.store.distances[step.target]
            if distance is not None:
                siblings = distance.reshape(-1, step.branching)
                overflow, count = (siblings == math.inf).any(dim=1), len(siblings)
                self.finite.record_flags(self.place(step.source, 0, count), ~siblings.isnan().any(dim=1))
                self.finite.record_flags(self.place(step.source, 0, count, stored=True), ~overflow)

    @torch.no_grad()
    def grow(self, model: VelocityModel) -> Bool[Tensor, ""]:
        """Grow everything; nothing here waits for the device.  Whether all log-probabilities are finite."""
        self.plant()
        while self.frontier.queue:
            self.call(model)
        return self.store.finish()

    @torch.no_grad()
    def run(self, model: VelocityModel, ranks: Ranks | None = None) -> Store:
        """Grow everything; then judge, once, whether all velocities were finite.  Clause: ROLL-1, ERR-3.

        A velocity that was not finite made its children's log-probabilities so. With ranks, those with fewer calls make
        idle ones, for a sharded model's calls are collectives.
        """
        finite = self.grow(model)
        if ranks is not None:
            for _ in range(ranks.largest(self.calls) - self.calls):
                self.velocities(model, [Ready(0, 0, 1)])
        if not bool(finite):
            self.judge_stochastic_steps()
        self.finite.verify(self.prompts, ranks)
        return self.store


def level_sigmas(growth: Growth, sizes: Sequence[int], sampling: Sampling) -> tuple[Tensor, ...]:
    """σ of every state, by level, on the device of the arithmetic."""
    table, repeats = torch.tensor([level.sigma for level in growth.levels], dtype=torch.float64), torch.tensor(sizes)
    every = table.to(sampling.dtype).repeat_interleave(repeats, output_size=sum(sizes))
    return torch.split(every.to(sampling.device, non_blocking=True), list(sizes))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenation along the first dimension; a single part is itself."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def check_prompts(prompts: Sequence[Prompt], condition: Condition) -> None:
    """At least one prompt, each id once, one condition each.  Clause: ROLL-3, ERR-3."""
    if not prompts:
        raise InputError("prompts", [], "at least one prompt")
    seen: set[int] = set()
    for i, prompt in enumerate(prompts):
        if prompt.id in seen:
            raise InputError(f"prompts[{i}].id", prompt.id, "named once: equal ids would have equal noise")
        seen.add(prompt.id)
    if len(condition) != len(prompts):
        raise InputError("len(condition)", len(condition), f"{len(prompts)}, one item a prompt")


def rollouts(
    plans: Sequence[Plan],
    model: VelocityModel,
    prompts: Sequence[Prompt],
    condition: Condition,
    sampling: Sampling,
    *,
    ranks: Ranks | None = None,
    share: Share | None = None,
) -> list[Tree]:
    """The trees of all prompts under each of several plans, in shared calls; equal states are made once.

    Clause: ROLL-1 … ROLL-5, NOISE-3, NOISE-4, SING-4, GRAN-3.  Work items of different σ, plan and prompt fill calls
    of at most ``sampling.chunk`` items.

    Args:
        plans: at least one; of equal numbers of roots.
        model: called for every parent once.
        prompts: distinct ids; they key the noise.
        condition: one item a prompt.
        sampling: noise, shapes, dtypes, device, capacity.
        ranks: if several processes roll out, each its own prompts or its own share: they fail together.
        share: grow only this rank's sub-trees of every tree; log-probabilities and states of the others' are 0 and
            undefined, see ``sharing``, also for the memory that this costs.

    Raises:
        InputError: prompts or conditions that do not match.
        ModelError: another shape or dtype family, or a non-finite velocity, with step, node and prompt.
        PlanError: no plan, or plans that cannot be rolled out together.
    """
    if not plans:
        raise PlanError("plans", [], "at least one plan")
    steps = min(plan.steps for plan in plans)
    if share is not None and share.depth >= steps:
        raise InputError("share.depth", share.depth, f"an integer in 0..{steps - 1}")
    growth, paths = shared_growth(plans)
    store = Grower(growth, prompts, condition, sampling, share).run(model, ranks)
    return [store.tree(plan, path) for plan, path in zip(plans, paths, strict=True)]


def rollout(
    plan: Plan,
    model: VelocityModel,
    prompts: Sequence[Prompt],
    condition: Condition,
    sampling: Sampling,
    *,
    ranks: Ranks | None = None,
    share: Share | None = None,
) -> Tree:
    """The trees of all prompts under one plan.

    Clause: ROLL-1 … ROLL-5, NOISE-3, NOISE-4.  Source: BranchGRPO §3.1, Algorithm 1.

    Args, raises: as ``rollouts``.
    """
    return rollouts([plan], model, prompts, condition, sampling, ranks=ranks, share=share)[0]
