"""Reward fusion: the value of a node from the rewards of its descendant leaves (spec: fusion)."""

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.reference.errors import RewardError
from branchgrpo.reference.log_probability import path_log_probability
from branchgrpo.reference.normalization import is_degenerate
from branchgrpo.reference.options import Fusion
from branchgrpo.reference.reward import NodeValues
from branchgrpo.reference.tree import Node, Tree


def path_log_probabilities(node: Node) -> Float64[Tensor, "leaves"]:
    """log p_beh(ℓ | n) for every ℓ in L(n).  Clause: LOGP-6."""
    return torch.stack([path_log_probability(leaf, node) for leaf in node.leaves()])


def path_softmax_weights(node: Node, beta: float) -> Float64[Tensor, "leaves"]:
    """w = softmax over L(n) of β·log p_beh(ℓ | n); β = 0 is uniform.

    Clause: FUSE-2, FUSE-3.  Source: BranchGRPO Eq. 6.
    """
    return torch.softmax(beta * path_log_probabilities(node), dim=0)


def standardised_weights(node: Node, beta: float) -> Float64[Tensor, "leaves"]:
    """Path softmax of log-probabilities standardised within L(n); uniform where they are equal (NORM-4).

    Clause: FUSE-5.
    """
    scores = path_log_probabilities(node)
    centred = scores - scores.mean()
    standard = torch.zeros_like(centred) if is_degenerate(scores) else centred / centred.square().mean().sqrt()
    return torch.softmax(beta * standard, dim=0)


def child_softmax_weights(node: Node, beta: float) -> Float64[Tensor, "leaves"]:
    """Bottom-up: softmax of β·log p over each node's children by their own edge, multiplied along the path.

    Clause: FUSE-4.  Source: what the public BranchGRPO code means; another estimator than FUSE-2 (DIV-B14).
    """
    if not node.children:
        return torch.ones(1, dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    scores = torch.stack([zero if child.log_prob is None else child.log_prob for child in node.children])
    weights = torch.softmax(beta * scores, dim=0)
    parts = [w * child_softmax_weights(child, beta) for w, child in zip(weights, node.children, strict=True)]
    return torch.cat(parts)


def leaf_weights(node: Node, options: Fusion) -> Float64[Tensor, "leaves"]:
    """Convex weights of the leaves under a node.  Clause: FUSE-1, FUSE-6, DIV-P6."""
    if options.kind == "path_softmax":
        return path_softmax_weights(node, options.beta)
    if options.kind == "child_softmax":
        return child_softmax_weights(node, options.beta)
    return standardised_weights(node, options.beta)


def fuse(tree: Tree, rewards: NodeValues, options: Fusion) -> NodeValues:
    """r̄(n) = Σ_ℓ w_ℓ r_ℓ for every node; a leaf keeps its own reward.

    Clause: FUSE-1 … FUSE-6.  Source: BranchGRPO Eq. 6.

    Args:
        tree: a grown tree.
        rewards: for each leaf, M rewards.
        options: estimator and β.

    Returns:
        For each node, M fused values in float64.

    Raises:
        RewardError: a leaf without rewards, or with one that is not finite.
    """
    for leaf in tree.root.leaves():
        if leaf not in rewards or not bool(torch.isfinite(rewards[leaf]).all()):
            found = rewards[leaf].tolist() if leaf in rewards else None
            raise RewardError(f"rewards of leaf {leaf.index}, prompt {tree.prompt.id}", found, "finite, one a model")
    values: NodeValues = {}
    for node in tree.root.walk():
        leaf_rewards = torch.stack([rewards[leaf] for leaf in node.leaves()])
        values[node] = leaf_weights(node, options) @ leaf_rewards if node.children else rewards[node]
    return values


def effective_sample_size(weights: Float64[Tensor, "leaves"]) -> Float64[Tensor, ""]:
    """1 / Σ w²: how many of the leaves the weights really use.  Clause: FUSE-7."""
    return 1.0 / weights.square().sum()
