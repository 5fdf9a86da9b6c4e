"""Growing all trees of all prompts, many parents a denoiser call (spec: rollout)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.optimized.denoiser import FiniteLog, Place, velocity
from branchgrpo.optimized.frontier import Frontier, Ready
from branchgrpo.optimized.fused import advance
from branchgrpo.optimized.growth import Growth, Step, plan_growth
from branchgrpo.optimized.kernels import step_coefficients
from branchgrpo.optimized.noise import branch_coefficients, branch_noise, level_keys
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.optimized.store import Store
from branchgrpo.optimized.tree import Tree
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, NoiseRole, Prompt, VelocityModel


class Grower:
    """One rollout in progress: a growth, its storage and its frontier."""

    def __init__(self, growth: Growth, prompts: Sequence[Prompt], condition: Condition, sampling: Sampling) -> None:
        check_prompts(prompts, condition)
        self.growth, self.condition, self.sampling = growth, condition, sampling
        self.prompts = tuple(prompts)
        self.ids = torch.tensor([prompt.id for prompt in prompts], dtype=torch.int64)
        self.store = Store(growth, prompts, sampling)
        self.frontier = Frontier(sampling.chunk)
        self.finite = FiniteLog()

    def draw(self, role: NoiseRole, level: int, first: int, last: int) -> Float[Tensor, "items *latent"]:
        """The draws of one role for a flat range of a level.  Clause: NOISE-3, NOISE-4."""
        spec, s = self.growth.levels[level], self.sampling
        keys = level_keys(s.iteration, role, spec.depth, self.ids, self.growth.roots, spec.width, first, last)
        return s.noise.draw(keys, s.latent_shape, s.dtype, s.device)

    def child_noise(self, step: Step, first: int, last: int) -> Float[Tensor, "parents K *latent"]:
        """ξ of all children of the parents first … last − 1.  Clause: NOISE-1, NOISE-3."""
        factor, spread = step.branching, step.plan.spreads[step.index]
        private = self.draw(NoiseRole.PRIVATE, step.target, first * factor, last * factor)
        private = torch.unflatten(private, 0, (last - first, factor))
        if factor == 1 or branch_coefficients(spread)[0] == 0.0:
            return private
        return branch_noise(self.draw(NoiseRole.SHARED, step.source, first, last), private, spread)

    def plant(self) -> None:
        """Draw and store the roots' initial noise.  Clause: ROLL-1."""
        count = len(self.prompts) * self.growth.roots
        self.store.states[0].copy_(self.draw(NoiseRole.ROOT, 0, 0, count))
        self.frontier.push(0, 0, count)

    def take_step(
        self, step: Step, ready: Ready, x: Float[Tensor, "items *latent"], v: Float[Tensor, "items *latent"]
    ) -> None:
        """Grow and store the children of one range along one step.  Clause: ROLL-1, ROLL-5, LOGP-3."""
        coefficients = step_coefficients(step.plan, step.index)
        noise = self.child_noise(step, ready.first, ready.last) if coefficients.std > 0 else None
        s, factor = self.sampling, step.branching
        mean, children, log_prob = advance(x, v, noise, coefficients, s.storage_dtype, s.reduction)
        first, last = ready.first * factor, ready.last * factor
        self.store.write(step.target, first, last, children, log_prob, mean)
        if self.growth.outgoing[step.target]:
            self.frontier.push(step.target, first, last)

    def call(self, model: VelocityModel) -> None:
        """One denoiser call for the next ready items, and all steps that leave them."""
        ranges, s = self.frontier.take(), self.sampling
        levels = [self.growth.levels[r.level] for r in ranges]
        roots, sizes = self.growth.roots, [r.last - r.first for r in ranges]
        pieces = zip(ranges, levels, sizes, strict=True)
        x = torch.cat([self.store.states[r.level][r.first : r.last] for r in ranges]).to(s.device, s.dtype)
        sigma = torch.cat([torch.full((n,), lv.sigma, dtype=s.dtype, device=s.device) for _, lv, n in pieces])
        rows = [
            torch.arange(r.first, r.last, device=s.device) // (roots * lv.width)
            for r, lv in zip(ranges, levels, strict=True)
        ]
        v = velocity(model, x, sigma, self.condition, torch.cat(rows), levels[0].depth)
        places = [
            Place(lv.depth, lv.width, roots, range(r.first, r.last)) for r, lv in zip(ranges, levels, strict=True)
        ]
        self.finite.record(places, v)
        for ready, x_part, v_part in zip(ranges, torch.split(x, sizes), torch.split(v, sizes), strict=True):
            for step in self.growth.outgoing[ready.level]:
                self.take_step(step, ready, x_part, v_part)

    @torch.no_grad()
    def run(self, model: VelocityModel) -> Store:
        """Grow everything; then judge, once, whether all velocities were finite.  Clause: ROLL-1, ERR-3."""
        self.plant()
        while self.frontier.queue:
            self.call(model)
        self.finite.verify(self.prompts)
        return self.store


def check_prompts(prompts: Sequence[Prompt], condition: Condition) -> None:
    """At least one prompt, each id once, one condition each.  Clause: ROLL-3, ERR-3."""
    if not prompts:
        raise InputError("prompts", [], "at least one prompt")
    for i, prompt in enumerate(prompts):
        if prompt.id in [other.id for other in prompts[:i]]:
            raise InputError(f"prompts[{i}].id", prompt.id, "named once: equal ids would have equal noise")
    if len(condition) != len(prompts):
        raise InputError("len(condition)", len(condition), f"{len(prompts)}, one item a prompt")


def rollout(
    plan: Plan, model: VelocityModel, prompts: Sequence[Prompt], condition: Condition, sampling: Sampling
) -> Tree:
    """All trees of all prompts under one plan.

    Clause: ROLL-1 … ROLL-5, NOISE-3, NOISE-4.  Source: BranchGRPO §3.1, Algorithm 1.

    Args:
        plan: what to grow.
        model: called for every parent once, at most ``sampling.chunk`` items a call.
        prompts: distinct ids; they key the noise.
        condition: one item a prompt.
        sampling: noise, shapes, dtypes, device, capacity.

    Raises:
        InputError: prompts or conditions that do not match.
        ModelError: another shape or dtype family, or a non-finite velocity, with step, node and prompt.
    """
    store = Grower(plan_growth(plan), prompts, condition, sampling).run(model)
    return store.tree(plan, range(plan.steps + 1))
