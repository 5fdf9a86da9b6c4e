"""Pruning of the backward pass: which edges stay in the loss (spec: pruning)."""

from collections.abc import Sequence

from branchgrpo.reference.depth_window import window_at
from branchgrpo.reference.errors import OptionError, PlanError
from branchgrpo.reference.normalization import reward_weights, unclipped_advantages
from branchgrpo.reference.options import DepthWindow, ExtremeB, Normalization, ParentTop1, PruningRule
from branchgrpo.reference.reward import NodeValues
from branchgrpo.reference.tree import Node, Tree

LeafKeys = dict[Node, float]
"""The key of a leaf: leaves are ordered by (−key, index)."""


def leaf_keys(trees: Sequence[Tree], values: NodeValues, weights: Sequence[float], options: Normalization) -> LeafKeys:
    """Weighted sum of a leaf's advantages before clipping; with one reward model, the reward itself.

    Clause: PRUNE-2.
    """
    leaves = [leaf for tree in trees for leaf in tree.root.leaves()]
    if len(weights) == 1:
        w = reward_weights(weights, len(values[leaves[0]]))
        return {leaf: float(w @ values[leaf]) for leaf in leaves}
    advantages = unclipped_advantages(trees, values, weights, options)
    return {leaf: float(advantages[leaf]) for leaf in leaves}


def ranked(leaves: Sequence[Node], keys: LeafKeys) -> list[Node]:
    """Leaves by (−key, index): best first, the lower index first among equals.  Clause: PRUNE-2."""
    return sorted(leaves, key=lambda leaf: (-keys[leaf], leaf.index))


def last_split_children(tree: Tree) -> list[list[Node]]:
    """For each parent of the last split its K children.

    Clause: PRUNE-3, ERR-2.

    Raises:
        PlanError: the plan has no split, so width pruning has nothing to choose between.
    """
    if not tree.plan.splits:
        raise PlanError("splits", tree.plan.splits, "not empty for width pruning")
    return [parent.children for parent in tree.level(tree.plan.splits[-1])]


def parent_top1_leaves(tree: Tree, keys: LeafKeys) -> set[Node]:
    """The leaves that stay: under each last-split parent the child whose leaf ranks first.

    Clause: PRUNE-3, DIV-B6.  Source: BranchGRPO §3.4, "Parent-Top1".
    """
    families = last_split_children(tree)
    return {ranked([leaf for child in family for leaf in child.leaves()], keys)[0] for family in families}


def extreme_leaves(tree: Tree, keys: LeafKeys, b: int) -> set[Node]:
    """The leaves that stay: the first b and the last b of the tree; all of them if 2b ≥ N.

    Clause: PRUNE-4.  Source: BranchGRPO §3.4, "Extreme selection".
    """
    last_split_children(tree)
    order = ranked(tree.root.leaves(), keys)
    return set(order[:b] + order[-b:])


def width_dropped(tree: Tree, stays: set[Node], drop_split_edges: bool) -> set[Node]:
    """Edges after the last split on chains to dropped leaves; with the option, their last-split edge too.

    Clause: PRUNE-3, PRUNE-4.
    """
    dropped: set[Node] = set()
    for child in (child for family in last_split_children(tree) for child in family):
        if stays.isdisjoint(child.leaves()):
            dropped |= {node for node in child.walk() if node is not child or drop_split_edges}
    return dropped


def depth_dropped(tree: Tree, rule: DepthWindow, iteration: int) -> set[Node]:
    """Edges whose child depth is in the window, split edges too.

    Clause: PRUNE-5.  Source: BranchGRPO §3.4, "Depth pruning"; departs from public code (DIV-B5).
    """
    window = window_at(rule, tree.plan.steps, iteration)
    return {edge for edge in tree.edges() if edge.depth in window}


def dropped_by(tree: Tree, rule: PruningRule, keys: LeafKeys, iteration: int) -> set[Node]:
    """The edges that one rule drops from one tree.  Clause: PRUNE-1."""
    if isinstance(rule, ParentTop1):
        return width_dropped(tree, parent_top1_leaves(tree, keys), rule.drop_split_edges)
    if isinstance(rule, ExtremeB):
        return width_dropped(tree, extreme_leaves(tree, keys, rule.b), rule.drop_split_edges)
    if isinstance(rule, DepthWindow):
        return depth_dropped(tree, rule, iteration)
    raise OptionError("pruning", rule, "ParentTop1, ExtremeB or DepthWindow")


def prune(trees: Sequence[Tree], keys: LeafKeys, rules: Sequence[PruningRule], iteration: int) -> set[Node]:
    """The edges that stay (named by the child they end in): all, less what any rule drops.

    Clause: PRUNE-1 … PRUNE-6.  Backward only: states, rewards, values and advantages are what they were; rules
    read rewards and depths alone, so their order does not matter.

    Args:
        trees: the batch.
        keys: for each leaf its key.
        rules: any of the rules.
        iteration: training iteration t ≥ 0, which moves depth windows.
    """
    kept: set[Node] = set()
    for tree in trees:
        dropped = [dropped_by(tree, rule, keys, iteration) for rule in rules]
        kept |= set(tree.edges()).difference(*dropped)
    return kept
