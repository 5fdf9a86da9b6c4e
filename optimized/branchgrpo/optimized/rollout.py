"""Growing all trees of all prompts, many parents a denoiser call (spec: rollout)."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.optimized.denoiser import FiniteLog, Place, velocity
from branchgrpo.optimized.frontier import Frontier, Ready
from branchgrpo.optimized.fused import advance
from branchgrpo.optimized.growth import Growth, Step, shared_growth
from branchgrpo.optimized.noise import NoiseInBulk, Places, branch_coefficients, branch_noise
from branchgrpo.optimized.ranks import Ranks, Share
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.optimized.store import Store
from branchgrpo.optimized.tree import Tree
from branchgrpo.reference.errors import InputError, PlanError
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, NoiseKeys, NoiseRole, Prompt, VelocityModel

LOOKAHEAD = 2**20
"""Numbers that may be drawn ahead of the call that needs them: 4 MiB in float32, and below that a draw's overhead
costs more than its numbers."""


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
        self.draws = needed_draws(growth)
        self.drawn: set[tuple[NoiseRole, int]] = set()
        self.ahead: dict[tuple[NoiseRole, int], tuple[int, Tensor | None]] = {}
        self.prompts = tuple(prompts)
        ids = torch.tensor([prompt.id for prompt in prompts], dtype=torch.int64)
        self.places = Places(ids, growth.roots, sampling.device)
        self.gathered: tuple[tuple[tuple[int, int, int], ...], Condition] | None = None
        self.store = Store(growth, prompts, sampling)
        self.frontier = Frontier(sampling.chunk)
        self.finite = FiniteLog()

    def noise_of(self, role: NoiseRole, level: int, first: int, last: int) -> Float[Tensor, "items *latent"]:
        """The draws of one role for a range of a level; what is small is drawn ahead of the calls that need it."""
        start, ready = self.ahead.pop((role, level), (first, None))
        if ready is None or last - start > len(ready):
            start, ready = self.draw_ahead(role, level, first, last)
        if last - start < len(ready):
            self.ahead[role, level] = (start, ready)
        return ready[first - start : last - start]

    def draw_ahead(self, role: NoiseRole, level: int, first: int, last: int) -> tuple[int, Tensor]:
        """The draws of a range, and of what comes after it as far as ``LOOKAHEAD`` goes; where they start.

        A level's own draws are made for all its calls. A source that makes draws in bulk is asked for later levels too.
        """
        room = 0 if self.share is not None else LOOKAHEAD // math.prod(self.sampling.latent_shape)
        end = min(max(last, first + room), len(self.store.states[level]))
        source, wanted = self.sampling.noise, [(role, level, first, end)]
        if first == 0 and isinstance(source, NoiseInBulk) and (role, level) in self.draws:
            taken = end
            for later in self.draws[self.draws.index((role, level)) + 1 :]:
                taken += len(self.store.states[later[1]])
                if taken > room:
                    break
                if later not in self.drawn:
                    wanted.append((*later, 0, len(self.store.states[later[1]])))
        self.drawn |= {place[:2] for place in wanted}
        if len(wanted) == 1 or not isinstance(source, NoiseInBulk):
            return first, self.draw(role, level, first, end)
        s = self.sampling
        found = source.draw_all([self.keys(*place) for place in wanted], s.latent_shape, s.dtype, s.device)
        self.ahead |= {
            (place[0], place[1]): (place[2], rows) for place, rows in zip(wanted[1:], found[1:], strict=True)
        }
        return first, found[0]

    def keys(self, role: NoiseRole, level: int, first: int, last: int) -> NoiseKeys:
        """The keys of one role for a flat range of a level.  Clause: NOISE-3, NOISE-4."""
        spec = self.growth.levels[level]
        return self.places.keys(self.sampling.iteration, role, spec.depth, spec.width, first, last)

    def draw(self, role: NoiseRole, level: int, first: int, last: int) -> Float[Tensor, "items *latent"]:
        """The draws of one role for a flat range of a level.  Clause: NOISE-3, NOISE-4."""
        s = self.sampling
        return s.noise.draw(self.keys(role, level, first, last), s.latent_shape, s.dtype, s.device)

    def child_noise(self, step: Step, first: int, last: int) -> Float[Tensor, "parents K *latent"]:
        """ξ of all children of the parents first … last − 1.  Clause: NOISE-1, NOISE-3."""
        factor, spread = step.branching, step.plan.spreads[step.index]
        private = self.noise_of(NoiseRole.PRIVATE, step.target, first * factor, last * factor)
        private = torch.unflatten(private, 0, (last - first, factor))
        if not is_shared(step):
            return private
        return branch_noise(self.noise_of(NoiseRole.SHARED, step.source, first, last), private, spread)

    def plant(self) -> None:
        """Draw and store the roots' initial noise.  Clause: ROLL-1."""
        count = len(self.prompts) * self.growth.roots
        self.store.states[0].copy_(self.draw(NoiseRole.ROOT, 0, 0, count))
        self.push(0, 0, count)

    def push(self, level: int, first: int, last: int) -> None:
        """Make a range wait for its velocity, if a step leaves its level; of a shared level, this rank's part of it."""
        if not self.growth.outgoing[level]:
            return
        if self.share is not None and self.growth.levels[level].depth == self.share.depth:
            owned = self.share.owned(len(self.store.states[level]))
            first, last = max(first, owned.start), min(last, owned.stop)
        if first < last:
            self.frontier.push(level, first, last)

    def take_step(
        self, step: Step, ready: Ready, x: Float[Tensor, "items *latent"], v: Float[Tensor, "items *latent"]
    ) -> None:
        """Grow and store the children of one range along one step.  Clause: ROLL-1, ROLL-5, LOGP-3."""
        coefficients = step.coefficients
        noise = self.child_noise(step, ready.first, ready.last) if coefficients.std > 0 else None
        s, factor = self.sampling, step.branching
        fast = s.compile and len(x) * factor * math.prod(s.latent_shape) >= COMPILE_FROM
        mean, children, log_prob = advance(x, v, noise, coefficients, s.storage_dtype, s.reduction, compile=fast)
        first, last = ready.first * factor, ready.last * factor
        self.store.write(step.target, first, last, children, log_prob, mean)
        self.push(step.target, first, last)

    def conditions(self, ranges: Sequence[Ready], items: int) -> Condition:
        """The condition of every item of a call, padding last; levels of one width in a row share it."""
        spans = tuple((self.growth.levels[r.level].width, r.first, r.last) for r in ranges)
        if self.gathered is None or self.gathered[0] != (*spans, (items, 0, 0)):
            rows = joined([self.places.prompt_rows(*span) for span in spans])
            rows = joined([rows, rows[-1:].expand(items - len(rows))]) if len(rows) < items else rows
            self.gathered = ((*spans, (items, 0, 0)), self.condition.gather(rows))
        return self.gathered[1]

    def velocities(self, model: VelocityModel, ranges: Sequence[Ready]) -> tuple[Tensor, Tensor]:
        """States and velocities of some ready ranges, one call; padded to the capacity if asked.  Clause: ROLL-3."""
        s, levels = self.sampling, [self.growth.levels[r.level] for r in ranges]
        x = joined([self.store.states[r.level][r.first : r.last] for r in ranges])
        x = x.to(s.device, s.dtype, non_blocking=True)
        pairs = zip(ranges, levels, strict=True)
        sigma = joined([torch.full((r.last - r.first,), lv.sigma, dtype=s.dtype, device=s.device) for r, lv in pairs])
        count, total = len(x), s.chunk if s.pad and s.chunk is not None else len(x)
        given = (x, sigma)
        if count < total:
            given = (
                torch.cat([x, x[-1:].expand(total - count, *x.shape[1:])]),
                torch.cat([sigma, sigma[-1:].expand(total - count)]),
            )
        v = velocity(model, *given, self.conditions(ranges, total), levels[0].depth)
        self.calls += 1
        return x, v[:count]

    def call(self, model: VelocityModel) -> None:
        """One denoiser call for the next ready items, and all steps that leave them."""
        ranges = self.frontier.take()
        x, v = self.velocities(model, ranges)
        sizes = [r.last - r.first for r in ranges]
        for ready, x_part, v_part in zip(ranges, torch.split(x, sizes), torch.split(v, sizes), strict=True):
            steps = self.growth.outgoing[ready.level]
            if all(step.coefficients.std == 0.0 for step in steps):
                self.finite.record([self.place(ready.level, ready.first, ready.last)], v_part)
            for step in steps:
                self.take_step(step, ready, x_part, v_part)

    def place(self, level: int, first: int, last: int) -> Place:
        """A range of a level, for messages."""
        spec = self.growth.levels[level]
        return Place(spec.depth, spec.width, self.growth.roots, range(first, last))

    def judge_stochastic_steps(self) -> None:
        """A velocity that was not finite made its children's log-probabilities so: one look a level, no step waits."""
        for step in self.growth.steps:
            log_prob = self.store.log_probs[step.target]
            if log_prob is not None:
                finite = torch.isfinite(log_prob).reshape(-1, step.branching).all(dim=1)
                self.finite.record_flags(self.place(step.source, 0, len(finite)), finite)

    @torch.no_grad()
    def grow(self, model: VelocityModel) -> None:
        """Grow everything; nothing here waits for the device."""
        self.plant()
        while self.frontier.queue:
            self.call(model)

    @torch.no_grad()
    def run(self, model: VelocityModel, ranks: Ranks | None = None) -> Store:
        """Grow everything; then judge, once, whether all velocities were finite.  Clause: ROLL-1, ERR-3.

        With ranks, those with fewer calls make idle ones, for a sharded model's calls are collectives.
        """
        self.grow(model)
        if ranks is not None:
            for _ in range(ranks.largest(self.calls) - self.calls):
                self.velocities(model, [Ready(0, 0, 1)])
        self.judge_stochastic_steps()
        self.finite.verify(self.prompts, ranks)
        return self.store


def is_shared(step: Step) -> bool:
    """Whether the children of a step have a common part in their noise.  Clause: NOISE-2."""
    return step.branching > 1 and branch_coefficients(step.plan.spreads[step.index])[0] != 0.0


def needed_draws(growth: Growth) -> list[tuple[NoiseRole, int]]:
    """The draws of a rollout in about the order in which they are needed, each (role, level) once."""
    draws = []
    for step in growth.steps:
        if step.coefficients.std > 0.0:
            draws.append((NoiseRole.PRIVATE, step.target))
            if is_shared(step):
                draws.append((NoiseRole.SHARED, step.source))
    return list(dict.fromkeys(draws))


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
            undefined, see ``sharing``.

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
