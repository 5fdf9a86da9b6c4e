"""The plan: the tree a rollout grows, as plain validated data (spec: plan)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from branchgrpo.reference.errors import PlanError, is_integer
from branchgrpo.reference.schedule import validate_schedule
from branchgrpo.reference.types import ODE, Kernel, LeafOutput


@dataclass(frozen=True)
class Plan:
    """Schedule, roots, and for every step a kernel, a branching factor and a branch spread.

    Clause: PLAN-1 … PLAN-7, PLAN-9.  Source: BranchGRPO §3 (tree); DanceGRPO, Flow-GRPO, MixGRPO as plans.

    Attributes:
        sigmas: T + 1 noise levels, strictly decreasing from 1 to 0.
        kernels: T kernels; step i goes from σ_i to σ_{i+1}.
        branching: T branching factors K_i ≥ 1; K_i > 1 needs a stochastic kernel.
        spreads: T branch spreads s_i in [0, ∞]; read only where K_i > 1.
        roots: R ≥ 1 initial noises a prompt, each the root of a tree.
        output: what a leaf hands to the reward.
        trained_steps: steps whose edges may be trained; None means every stochastic step.
        trained_fraction: f in (0, 1]; below 1 each chain trains ⌊f·S⌋ of the S trainable steps (PLAN-7).
    """

    sigmas: tuple[float, ...]
    kernels: tuple[Kernel, ...]
    branching: tuple[int, ...]
    spreads: tuple[float, ...]
    roots: int = 1
    output: LeafOutput = LeafOutput.DENOISED
    trained_steps: tuple[int, ...] | None = None
    trained_fraction: float = 1.0

    def __post_init__(self) -> None:
        for name in ("sigmas", "kernels", "branching", "spreads"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        validate_plan(self)

    @property
    def steps(self) -> int:
        """T, the number of denoising steps."""
        return len(self.sigmas) - 1

    @property
    def deltas(self) -> tuple[float, ...]:
        """Δ_i = σ_i − σ_{i+1} > 0."""
        return tuple(a - b for a, b in zip(self.sigmas, self.sigmas[1:], strict=False))

    @property
    def effective_kernels(self) -> tuple[Kernel, ...]:
        """The kernels as rolled out: under ``denoised`` the last step is exactly an ODE step (PLAN-6, DIV-B9)."""
        return (*self.kernels[:-1], ODE) if self.output is LeafOutput.DENOISED else self.kernels

    @property
    def stochastic_steps(self) -> tuple[int, ...]:
        """Steps with std > 0, whose edges have a log-probability."""
        kernels = self.effective_kernels
        return tuple(i for i in range(self.steps) if kernels[i].is_stochastic(self.sigmas[i + 1]))

    @property
    def trainable_steps(self) -> tuple[int, ...]:
        """Stochastic steps that are in ``trained_steps``: the causal credit rule (PLAN-6)."""
        allowed = self.stochastic_steps if self.trained_steps is None else self.trained_steps
        return tuple(i for i in self.stochastic_steps if i in allowed)

    @property
    def splits(self) -> tuple[int, ...]:
        """Steps with K_i > 1, ascending."""
        return tuple(i for i, k in enumerate(self.branching) if k > 1)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """n_0 = 1, n_{d+1} = n_d·K_d: nodes of *one root's tree* at each depth 0 … T (PLAN-4)."""
        return tuple(accumulate(self.branching, mul, initial=1))

    @property
    def leaves(self) -> int:
        """N = n_T: leaves of one root's tree."""
        return self.level_sizes[-1]


def branching_from_splits(steps: int, splits: Sequence[int], factor: int) -> tuple[int, ...]:
    """Branching factors with K at each split step and 1 elsewhere.

    Clause: PLAN-2, ERR-2, DIV-B13.

    Raises:
        PlanError: a split step that is negative, ≥ T or named twice.
    """
    for i, step in enumerate(splits):
        if not is_integer(step) or not 0 <= step < steps:
            raise PlanError(f"splits[{i}]", step, f"an integer in 0..{steps - 1}")
        if step in splits[:i]:
            raise PlanError(f"splits[{i}]", step, "named once")
    return tuple(factor if i in splits else 1 for i in range(steps))


def validate_plan(plan: Plan) -> None:
    """Check everything that can be checked before sampling.

    Clause: PLAN-1 … PLAN-7, ERR-2.

    Raises:
        PlanError: names the field and, for per-step fields, the step.
    """
    validate_schedule(plan.sigmas)
    steps = plan.steps
    for name in ("kernels", "branching", "spreads"):
        if len(getattr(plan, name)) != steps:
            raise PlanError(f"len({name})", len(getattr(plan, name)), f"T = {steps}, one a step")
    if plan.output not in tuple(LeafOutput):
        raise PlanError("output", plan.output, f"one of {[o.value for o in LeafOutput]}")
    if not is_integer(plan.roots) or plan.roots < 1:
        raise PlanError("roots", plan.roots, "an integer ≥ 1")
    stochastic = plan.stochastic_steps
    for i, (factor, spread) in enumerate(zip(plan.branching, plan.spreads, strict=True)):
        if not is_integer(factor) or factor < 1:
            raise PlanError(f"branching[{i}]", factor, "an integer ≥ 1")
        if factor > 1 and i not in stochastic:
            raise PlanError(f"branching[{i}]", factor, "1 where the step is deterministic (its std is 0)")
        if not spread >= 0.0:
            raise PlanError(f"spreads[{i}]", spread, "in [0, ∞]")
    validate_training(plan)


def validate_training(plan: Plan) -> None:
    """Check the trained steps and the trained fraction (PLAN-6, PLAN-7, ERR-2).

    Raises:
        PlanError: a trained step that is repeated, out of range or without a log-probability.
    """
    named, stochastic, sizes = plan.trained_steps or (), plan.stochastic_steps, plan.level_sizes
    for i, step in enumerate(named):
        if step not in stochastic or step in named[:i]:
            raise PlanError(f"trained_steps[{i}]", step, f"named once and one of {stochastic}")
    if not 0.0 < plan.trained_fraction <= 1.0:
        raise PlanError("trained_fraction", plan.trained_fraction, "in (0, 1]")
    trainable = plan.trainable_steps
    if plan.trained_fraction < 1.0 and not trainable:
        raise PlanError("trained_fraction", plan.trained_fraction, "1 where no step is trainable")
    shared = [i for i in trainable if sizes[i + 1] < sizes[-1]]
    if plan.trained_fraction < 1.0 and shared:
        raise PlanError("trained_fraction", plan.trained_fraction, f"1 where chains share trainable steps ({shared})")
