"""A method: a plan, or a rule that gives one an iteration, with the options of all that follows (spec: plan)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from branchgrpo.reference.depth_window import check_trainable_left, largest_shift
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.options import (
    DepthWindow,
    ExtremeB,
    Fusion,
    Normalization,
    Objective,
    ParentTop1,
    PruningRule,
)
from branchgrpo.reference.plan import Plan, branching_from_splits
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import ODE, Kernel, LeafOutput, Reduction
from branchgrpo.reference.windows import WindowedPlan


def tree_plan(
    steps: int,
    kernel: Kernel,
    *,
    splits: Sequence[int] = (),
    branching: int = 1,
    spread: float = math.inf,
    shift: float = 3.0,
    sde_steps: Sequence[int] | None = None,
    roots: int = 1,
    output: LeafOutput = LeafOutput.DENOISED,
    trained_steps: tuple[int, ...] | None = None,
    trained_fraction: float = 1.0,
) -> Plan:
    """A plan with one kernel, one branching factor and one spread.

    Clause: PLAN-1 … PLAN-7.

    Args:
        steps: T.
        kernel: kernel of the stochastic steps.
        splits: B, the steps that branch.
        branching: K at every split.
        spread: s at every split.
        shift: of the schedule.
        sde_steps: steps that use ``kernel`` beside the splits; None means all, the others are ODE steps.
        roots, output, trained_steps, trained_fraction: see ``Plan``.
    """
    noisy = set(range(steps)) if sde_steps is None else {*sde_steps, *splits}
    return Plan(
        sigmas=shifted_schedule(steps, shift),
        kernels=tuple(kernel if i in noisy else ODE for i in range(steps)),
        branching=branching_from_splits(steps, splits, branching),
        spreads=(spread,) * steps,
        roots=roots,
        output=output,
        trained_steps=trained_steps,
        trained_fraction=trained_fraction,
    )


@dataclass(frozen=True)
class Method:
    """Everything that defines one published method, apart from model, rewards and optimiser.

    Clause: PLAN-8.

    Attributes:
        name: preset name.
        source: where the settings are published.
        sampler: a plan, a plan that moves with the iteration, or a plan family.
        log_prob: reduction of log-probabilities; clip ranges mean something only beside it.
        fusion, normalization, pruning, objective: the options of each.
    """

    name: str
    source: str
    sampler: Plan | WindowedPlan | PlanFamily
    log_prob: Reduction = Reduction.MEAN
    fusion: Fusion = field(default_factory=Fusion)
    normalization: Normalization = field(default_factory=Normalization)
    pruning: tuple[PruningRule, ...] = ()
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        plan = self.sampler.base if isinstance(self.sampler, WindowedPlan) else self.sampler
        for i, rule in enumerate(self.pruning):
            if isinstance(plan, PlanFamily) or (isinstance(rule, ParentTop1 | ExtremeB) and not plan.splits):
                raise OptionError(f"pruning[{i}]", rule, "a rule whose plan has a split, and none for a plan family")
            if isinstance(rule, DepthWindow):
                largest_shift(rule, plan.steps)

    def plan_at(self, iteration: int, seed: int = 0) -> Plan | PlanFamily:
        """The plan or family of one iteration, with something left to train.  Clause: WIN-1, PLAN-8, OBJ-3, ERR-2."""
        plan = self.sampler.at(iteration, seed) if isinstance(self.sampler, WindowedPlan) else self.sampler
        if isinstance(plan, Plan):
            check_trainable_left(plan, self.pruning, iteration)
        return plan
