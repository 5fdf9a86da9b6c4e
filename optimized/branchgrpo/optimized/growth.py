"""What one or several plans grow: levels of states and the steps between them (spec: rollout, singular)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from branchgrpo.optimized.kernels import Coefficients, step_coefficients
from branchgrpo.reference.errors import PlanError
from branchgrpo.reference.plan import Plan


@dataclass(frozen=True)
class Level:
    """States at one noise level with one history.

    Attributes:
        depth: steps from the root; part of the noise key.
        sigma: σ of the states.
        width: nodes of one root's tree.
    """

    depth: int
    sigma: float
    width: int


@dataclass(frozen=True)
class Step:
    """Step ``index`` of ``plan``, from one level to another."""

    source: int
    target: int
    plan: Plan
    index: int

    @cached_property
    def branching(self) -> int:
        """K, children a parent."""
        return self.plan.branching[self.index]

    @cached_property
    def coefficients(self) -> Coefficients:
        """α, γ and std of the step."""
        return step_coefficients(self.plan, self.index)


@dataclass(frozen=True)
class Growth:
    """Levels in an order in which sources come before targets, and the steps between them.

    A level with an outgoing step is called once, however many steps leave it (ROLL-3, SING-4, GRAN-3).
    """

    roots: int
    levels: tuple[Level, ...]
    steps: tuple[Step, ...]

    @cached_property
    def outgoing(self) -> tuple[tuple[Step, ...], ...]:
        """For every level the steps that leave it."""
        return tuple(tuple(s for s in self.steps if s.source == i) for i in range(len(self.levels)))

    @property
    def calls(self) -> int:
        """Denoiser calls a prompt."""
        return self.roots * sum(level.width for level, out in zip(self.levels, self.outgoing, strict=True) if out)


def level_names(plan: Plan) -> list[tuple[tuple[object, ...], ...]]:
    """For every depth what its states are a function of, beside model, prompt and noise: all steps up to it.

    Two levels, of one plan or of two, have one name exactly if their states are equal; a spread counts where siblings
    part, and noise is keyed by depth and node, not by plan.  Clause: NOISE-4, SING-4, GRAN-3.
    """
    steps = [
        (after, kernel, factor, spread if factor > 1 else 0.0)
        for after, kernel, factor, spread in zip(
            plan.sigmas[1:], plan.effective_kernels, plan.branching, plan.spreads, strict=True
        )
    ]
    return [tuple(steps[:depth]) for depth in range(plan.steps + 1)]


def shared_growth(plans: Sequence[Plan]) -> tuple[Growth, list[tuple[int, ...]]]:
    """All levels of several plans, equal ones once; and for each plan the numbers of its levels by depth.

    Clause: ROLL-1, SING-1, SING-4, GRAN-3.  A single plan is a chain. The members of a plan family form a trie: one
    anchor, stopped at max M, the children of every k, and continuations that agree as far as their schedules do.

    Raises:
        PlanError: plans with different numbers of roots.
    """
    numbers: dict[tuple[tuple[object, ...], ...], int] = {}
    levels: list[Level] = []
    steps: list[Step] = []
    paths: list[tuple[int, ...]] = []
    for plan in plans:
        if plan.roots != plans[0].roots:
            raise PlanError("roots", plan.roots, f"{plans[0].roots} for all plans of one rollout")
        names = level_names(plan)
        for depth, name in enumerate(names):
            if name in numbers:
                continue
            numbers[name] = len(levels)
            levels.append(Level(depth, plan.sigmas[depth], plan.level_sizes[depth]))
            if depth > 0:
                steps.append(Step(numbers[names[depth - 1]], numbers[name], plan, depth - 1))
        paths.append(tuple(numbers[name] for name in names))
    return Growth(plans[0].roots, tuple(levels), tuple(steps)), paths
