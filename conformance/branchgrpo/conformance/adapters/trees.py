"""Between the reference's trees of nodes and level-order arrays (spec: trace)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from branchgrpo.reference.implementation import Levels, Trace
from branchgrpo.reference.kernels import plan_stds
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Prompt
from branchgrpo.reference.tree import Node, Tree


def level_of(trees: Sequence[Tree], prompts: int, depth: int, read: Callable[[Node], Tensor]) -> Tensor:
    """A quantity of all nodes of a depth, ``[prompts, R·n_d, *rest]``.  Clause: TRACE-2."""
    rows = torch.stack([read(node) for tree in trees for node in tree.level(depth)])
    return rows.reshape(prompts, -1, *rows.shape[1:])


def mean_of(node: Node) -> Tensor:
    """Mean of the edge that ends in the node."""
    assert node.mean is not None
    return node.mean


def log_prob_of(node: Node) -> Tensor:
    """Log-probability of the edge that ends in the node, of a stochastic step."""
    assert node.log_prob is not None
    return node.log_prob


def to_trace(plan: Plan, prompts: Sequence[Prompt], trees: Sequence[Tree]) -> Trace:
    """All trees, prompts outermost and roots next, as one trace.  Clause: TRACE-1 … TRACE-3."""
    depths, count = range(1, plan.steps + 1), len(prompts)
    noisy = [depth - 1 in plan.stochastic_steps for depth in depths]
    return Trace(
        plan=plan,
        prompts=tuple(prompts),
        states=tuple(level_of(trees, count, depth, lambda node: node.state) for depth in range(plan.steps + 1)),
        means=tuple(level_of(trees, count, depth, mean_of) for depth in depths),
        stds=torch.tensor(plan_stds(plan), dtype=torch.float64),
        log_probs=tuple(
            level_of(trees, count, depth, log_prob_of) if is_noisy else None
            for depth, is_noisy in zip(depths, noisy, strict=True)
        ),
    )


def to_trees(trace: Trace) -> list[Tree]:
    """The trees of a trace, prompts outermost and roots next; log-probabilities on the CPU.  Clause: TRACE-2."""
    plan = trace.plan
    trees = []
    for row, prompt in enumerate(trace.prompts):
        for root_index in range(plan.roots):
            level = [Node(0, 0, trace.states[0][row, root_index])]
            tree = Tree(plan, prompt, root_index, level[0])
            for depth in range(1, plan.steps + 1):
                level = [
                    child_of(trace, row, root_index, depth, parent, branch)
                    for parent in level
                    for branch in range(plan.branching[depth - 1])
                ]
            trees.append(tree)
    return trees


def child_of(trace: Trace, row: int, root_index: int, depth: int, parent: Node, branch: int) -> Node:
    """One child from the arrays, linked to its parent."""
    plan = trace.plan
    index = parent.index * plan.branching[depth - 1] + branch
    at = root_index * plan.level_sizes[depth] + index
    log_probs = trace.log_probs[depth - 1]
    child = Node(
        depth,
        index,
        trace.states[depth][row, at],
        parent,
        trace.means[depth - 1][row, at],
        float(trace.stds[depth - 1]),
        None if log_probs is None else log_probs[row, at].cpu(),
    )
    parent.children.append(child)
    return child


def bare_trees(plan: Plan, prompts: int) -> list[Tree]:
    """Trees of a plan without states, for operations that read only the shape; prompt ids are the row numbers."""
    empty = torch.zeros(1, dtype=torch.float64)
    trees = []
    for row in range(prompts):
        for root_index in range(plan.roots):
            level = [Node(0, 0, empty)]
            trees.append(Tree(plan, Prompt(row, f"row {row}"), root_index, level[0]))
            for depth, factor in enumerate(plan.branching, start=1):
                level = [grown(depth, parent, factor, branch) for parent in level for branch in range(factor)]
    return trees


def grown(depth: int, parent: Node, factor: int, branch: int) -> Node:
    """A child without a state of its own, linked to its parent."""
    child = Node(depth, parent.index * factor + branch, parent.state, parent)
    parent.children.append(child)
    return child


def from_levels(trees: Sequence[Tree], levels: Levels) -> dict[Node, Tensor]:
    """For every node its entry of ``[prompts, R·n_d, *rest]`` arrays, on the CPU.  Clause: TRACE-2."""
    return {
        node: entry
        for depth, level in enumerate(levels)
        for node, entry in zip(
            (node for tree in trees for node in tree.level(depth)), level.cpu().flatten(0, 1).unbind(0), strict=True
        )
    }


def to_levels(trees: Sequence[Tree], prompts: int, values: dict[Node, Tensor], steps: int) -> Levels:
    """Arrays ``[prompts, R·n_d, *rest]`` of a value a node.  Clause: TRACE-2."""
    return tuple(level_of(trees, prompts, depth, lambda node: values[node]) for depth in range(steps + 1))
