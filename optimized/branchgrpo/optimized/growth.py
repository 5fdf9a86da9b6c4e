"""What one or several plans grow: levels of states and the steps between them (spec: rollout, singular)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from branchgrpo.optimized.kernels import Coefficients, step_coefficients
from branchgrpo.optimized.noise import branch_coefficients
from branchgrpo.reference.errors import PlanError
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseRole


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

    @cached_property
    def shares_noise(self) -> bool:
        """Whether the children of a parent have a common part in their noise.  Clause: NOISE-2."""
        return self.branching > 1 and branch_coefficients(self.plan.spreads[self.index])[0] != 0.0


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

    @cached_property
    def draws(self) -> tuple[tuple[NoiseRole, int], ...]:
        """The draws of a rollout in about the order in which they are needed, each (role, level) once.

        Clause: NOISE-3.
        """
        draws = [(NoiseRole.ROOT, 0)]
        for step in self.steps:
            if step.coefficients.std > 0.0:
                draws.append((NoiseRole.PRIVATE, step.target))
                if step.shares_noise:
                    draws.append((NoiseRole.SHARED, step.source))
        return tuple(dict.fromkeys(draws))

    @property
    def calls(self) -> int:
        """Denoiser calls a prompt."""
        return self.roots * sum(level.width for level, out in zip(self.levels, self.outgoing, strict=True) if out)


def step_names(plan: Plan) -> list[tuple[object, ...]]:
    """For every step what its children are a function of, beside their parents, model, prompt and noise.

    Two levels, of one plan or of two, are equal exactly if all steps that lead to them have equal names; a spread
    counts where siblings part, and noise is keyed by depth and node, not by plan.  Clause: NOISE-4, SING-4, GRAN-3.
    """
    return [
        (after, kernel, factor, spread if factor > 1 else 0.0)
        for after, kernel, factor, spread in zip(
            plan.sigmas[1:], plan.effective_kernels, plan.branching, plan.spreads, strict=True
        )
    ]


def shared_growth(plans: Sequence[Plan]) -> tuple[Growth, list[tuple[int, ...]]]:
    """All levels of several plans, equal ones once; and for each plan the numbers of its levels by depth.

    Clause: ROLL-1, SING-1, SING-4, GRAN-3.  A single plan is a chain. The members of a plan family form a trie: one
    anchor, stopped at max M, the children of every k, and continuations that agree as far as their schedules do.

    Raises:
        PlanError: plans with different numbers of roots.
    """
    growth, paths = trie(tuple(plans))
    return growth, list(paths)


@lru_cache(maxsize=32)
def trie(plans: tuple[Plan, ...]) -> tuple[Growth, tuple[tuple[int, ...], ...]]:
    """``shared_growth``, which every iteration asks for anew."""
    numbers: dict[tuple[int, tuple[object, ...]], int] = {}
    levels = [Level(0, plans[0].sigmas[0], 1)]
    steps: list[Step] = []
    paths: list[tuple[int, ...]] = []
    for plan in plans:
        if plan.roots != plans[0].roots:
            raise PlanError("roots", plan.roots, f"{plans[0].roots} for all plans of one rollout")
        path, widths = [0], plan.level_sizes
        for index, name in enumerate(step_names(plan)):
            place = (path[-1], name)
            if place not in numbers:
                numbers[place] = len(levels)
                levels.append(Level(index + 1, plan.sigmas[index + 1], widths[index + 1]))
                steps.append(Step(path[-1], numbers[place], plan, index))
            path.append(numbers[place])
        paths.append(tuple(path))
    return Growth(plans[0].roots, tuple(levels), tuple(steps)), tuple(paths)
