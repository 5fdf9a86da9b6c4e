"""What a plan, or a plan family, grows: levels of states and the steps between them (spec: rollout, singular)."""

from dataclasses import dataclass
from functools import cached_property

from branchgrpo.reference.family import PlanFamily
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

    @property
    def branching(self) -> int:
        """K, children a parent."""
        return self.plan.branching[self.index]


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


def plan_growth(plan: Plan) -> Growth:
    """A chain of levels, depth 0 … T.  Clause: ROLL-1."""
    sizes = zip(plan.sigmas, plan.level_sizes, strict=True)
    levels = tuple(Level(depth, sigma, width) for depth, (sigma, width) in enumerate(sizes))
    return Growth(plan.roots, levels, tuple(Step(i, i + 1, plan, i) for i in range(plan.steps)))


def member_path(family: PlanFamily, k: int, granularity: int) -> list[tuple[int, ...]]:
    """Names of a member's levels: (i,) on the anchor, (k, −1, indices visited so far …) from its children on.

    Two levels have one name exactly if their states are the same function of the same noise.  Clause: SING-4, GRAN-3.
    """
    visited = family.continuation(k, granularity)
    return [(i,) for i in range(k + 1)] + [(k, -1, *visited[: i + 1]) for i in range(len(visited))]


def family_growth(family: PlanFamily) -> tuple[Growth, dict[tuple[int, int], tuple[int, ...]]]:
    """The anchor (stopped at max M), the children of every k and a trie of continuations; with each member's levels.

    Clause: SING-1, SING-4, GRAN-1, GRAN-3.
    """
    numbers: dict[tuple[int, ...], int] = {}
    levels: list[Level] = []
    steps: list[Step] = []
    paths: dict[tuple[int, int], tuple[int, ...]] = {}
    for k, granularity in family.members():
        plan = family.member(k, granularity)
        names = member_path(family, k, granularity)
        for depth, name in enumerate(names):
            if name in numbers:
                continue
            numbers[name] = len(levels)
            levels.append(Level(depth, plan.sigmas[depth], plan.level_sizes[depth]))
            if depth > 0:
                steps.append(Step(numbers[names[depth - 1]], numbers[name], plan, depth - 1))
        paths[k, granularity] = tuple(numbers[name] for name in names)
    return Growth(family.roots, tuple(levels), tuple(steps)), paths
