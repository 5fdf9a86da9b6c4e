"""From a method to its drawing: which edges are pruned and which are trained."""

from torch import zeros

from branchgrpo.drawing.family import draw_family
from branchgrpo.drawing.tree import Mask, draw_tree
from branchgrpo.reference.counts import Counts, count
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import Method
from branchgrpo.reference.options import DepthWindow
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Prompt
from branchgrpo.reference.pruning import prune
from branchgrpo.reference.subsets import trained_subset
from branchgrpo.reference.tree import Node, Tree
from branchgrpo.reference.windows import WindowedPlan

GOLDEN_RATIO = 0.6180339887498949


def skeleton(plan: Plan, root_index: int) -> Tree:
    """The tree that a rollout of ``plan`` grows, without states: nodes, depths and order only."""
    nothing = zeros(1)
    root = Node(depth=0, index=0, state=nothing)
    level = [root]
    for factor in plan.branching:
        for parent in level:
            first = parent.index * factor
            parent.children = [Node(parent.depth + 1, first + b, nothing, parent) for b in range(factor)]
        level = [child for parent in level for child in parent.children]
    return Tree(plan, Prompt(0, ""), root_index, root)


def example_rewards(trees: list[Tree]) -> dict[Node, float]:
    """A fixed, evenly mixed reward for every leaf: the fractional part of (i + 1)·φ, no two alike."""
    leaves = [leaf for tree in trees for leaf in tree.root.leaves()]
    return {leaf: (i + 1) * GOLDEN_RATIO % 1.0 for i, leaf in enumerate(leaves)}


def kept_edges(trees: list[Tree], method: Method, iteration: int) -> Mask:
    """Which edges the method's pruning keeps under the example rewards, level by level, roots outermost."""
    kept = prune(trees, example_rewards(trees), method.pruning, iteration)
    depths = range(1, trees[0].plan.steps + 1)
    return [[node in kept for tree in trees for node in tree.level(depth)] for depth in depths]


def trained_edges(plan: Plan, kept: Mask, iteration: int) -> Mask:
    """Which kept edges are trained: those of trainable steps, and of the chain's subset where there is one."""
    levels = []
    for step, level in enumerate(kept):
        size = plan.level_sizes[step + 1]
        learns = [stays and step in plan.trainable_steps for stays in level]
        if plan.trained_fraction < 1.0:
            learns = [
                found and step in trained_subset(plan, 0, iteration, 0, j // size, j % size)
                for j, found in enumerate(learns)
            ]
        levels.append(learns)
    return levels


def notes_of(method: Method, counts: Counts, iteration: int) -> list[str]:
    """The lines under the title: counts, and what the drawing had to choose."""
    facts = [
        f"{counts.leaves:,} leaves, {counts.nodes:,} nodes, {counts.denoiser_calls:,} denoiser calls"
        f" ({counts.nfe_calls:.4f} a leaf), {counts.kept_edges:,} of {counts.edges:,} edges kept,"
        f" {counts.trained_edges:,} trained"
    ]
    if any(not isinstance(rule, DepthWindow) for rule in method.pruning):
        facts.append("Which leaves stay depends on their rewards; these are example rewards.")
    if isinstance(method.sampler, WindowedPlan) or any(isinstance(rule, DepthWindow) for rule in method.pruning):
        facts.append(f"Windows as at iteration {iteration}.")
    return facts


def draw_method(method: Method, iteration: int) -> str:
    """The SVG of what ``method`` samples for one prompt at an iteration."""
    plan = method.plan_at(iteration)
    title, notes = method.name, notes_of(method, count(method, iteration), iteration)
    if isinstance(plan, PlanFamily):
        several = [f"One of {plan.roots} roots is drawn; the counts are for all of them."] if plan.roots > 1 else []
        return draw_family(plan, title, [*notes, *several])
    trees = [skeleton(plan, root) for root in range(plan.roots)]
    kept = kept_edges(trees, method, iteration)
    return draw_tree(plan, kept, trained_edges(plan, kept, iteration), title, notes)
