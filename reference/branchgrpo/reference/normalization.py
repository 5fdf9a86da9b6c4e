"""Depth-wise advantages (spec: normalization)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.options import Normalization
from branchgrpo.reference.reward import NodeValues
from branchgrpo.reference.tree import Node, Tree

NodeAdvantages = dict[Node, Float64[Tensor, ""]]
"""An advantage a node; the advantage of an edge is that of the child it ends in."""

EQUAL = 2.0**-40
"""Relative spread up to which values count as equal (NORM-4): rounding leaves ≤ N·2⁻⁵³, float32 steps are ≥ 2⁻²⁴."""


def is_degenerate(values: Float64[Tensor, "nodes"]) -> bool:
    """One value, or max − min ≤ 2⁻⁴⁰ · max|r̄|.  Clause: NORM-4, DIV-P3."""
    return len(values) < 2 or bool(values.max() - values.min() <= EQUAL * values.abs().max())


def standard_deviation(values: Float64[Tensor, "nodes"], bessel: bool) -> Float64[Tensor, ""]:
    """Std with n − 1 (Bessel) or n in the denominator.  Clause: NORM-3."""
    return values.std(correction=1 if bessel else 0)


def standardise(
    values: Float64[Tensor, "nodes"],
    mean_group: Float64[Tensor, "mean_nodes"],
    std_group: Float64[Tensor, "std_nodes"],
    options: Normalization,
) -> Float64[Tensor, "nodes"]:
    """A = (r̄ − mean) / (std + ε), and exactly 0 where either group is degenerate.

    Clause: NORM-1, NORM-3, NORM-4.  Source: BranchGRPO Eq. 7; GRPO (arXiv 2402.03300) Eq. 4.
    """
    if is_degenerate(mean_group) or is_degenerate(std_group):
        return torch.zeros_like(values)
    return (values - mean_group.mean()) / (standard_deviation(std_group, options.bessel) + options.eps)


def in_scope(scope: str, tree: Tree, other: Tree) -> bool:
    """Whether ``other`` is in ``tree``'s scope: the tree, the trees of its prompt, or the batch.  Clause: NORM-2."""
    return scope == "batch" or other is tree or (scope == "prompt" and other.prompt.id == tree.prompt.id)


def group(
    scope: str, tree: Tree, trees: Sequence[Tree], depth: int, column: NodeAdvantages
) -> Float64[Tensor, "nodes"]:
    """Values of N_d: the nodes at depth d of the scope.  Clause: NORM-2."""
    members = [node for other in trees if in_scope(scope, tree, other) for node in other.level(depth)]
    return torch.stack([column[node] for node in members])


def normalize_column(trees: Sequence[Tree], column: NodeAdvantages, options: Normalization) -> NodeAdvantages:
    """Depth-wise advantages of one reward.  Clause: NORM-1 … NORM-4."""
    result: NodeAdvantages = {}
    for tree in trees:
        for depth in range(tree.plan.steps + 1):
            level = tree.level(depth)
            mean_group = group(options.mean_scope, tree, trees, depth, column)
            std_group = group(options.std_scope, tree, trees, depth, column)
            values = torch.stack([column[node] for node in level])
            result |= dict(zip(level, standardise(values, mean_group, std_group, options), strict=True))
    return result


def unclipped_advantages(
    trees: Sequence[Tree], values: NodeValues, weights: Sequence[float], options: Normalization
) -> NodeAdvantages:
    """Weighted sum over reward models of the advantages, before clipping.

    Clause: NORM-5, NORM-6.  ``sum_then_normalize`` sums the weighted rewards first.
    """
    w = reward_weights(weights, len(next(iter(values.values()))))
    if options.order == "sum_then_normalize":
        return normalize_column(trees, {node: w @ value for node, value in values.items()}, options)
    columns = [
        normalize_column(trees, {node: value[m] for node, value in values.items()}, options) for m in range(len(w))
    ]
    return {node: w @ torch.stack([column[node] for column in columns]) for node in values}


def reward_weights(weights: Sequence[float], models: int) -> Float64[Tensor, "models"]:
    """The weights as float64, one finite real a reward model, not all 0 (NORM-5, REW-4, ERR-4)."""
    w = torch.tensor(list(weights), dtype=torch.float64)
    if w.shape != (models,) or not bool(torch.isfinite(w).all()) or not bool(w.any()):
        raise OptionError("weights", tuple(weights), f"{models} finite reals, one a reward model, not all 0")
    return w


def normalize(
    trees: Sequence[Tree], values: NodeValues, weights: Sequence[float], options: Normalization
) -> NodeAdvantages:
    """Advantages of all nodes: normalised a depth and reward model, summed with weights, clipped once to ±A_max.

    Clause: NORM-1 … NORM-7.  Source: BranchGRPO Eq. 7; G²RPO Eq. 10.

    Args:
        trees: the whole batch: every prompt's trees.
        values: for each node of every tree, M fused values.
        weights: M reward weights.
        options: scopes, std, ε, A_max, order.
    """
    advantages = unclipped_advantages(trees, values, weights, options)
    return {node: a.clamp(-options.clip, options.clip) for node, a in advantages.items()}
