"""Reward fusion over contiguous leaves (spec: fusion)."""

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.optimized.normalization import EQUAL
from branchgrpo.optimized.tree import Levels, Tree
from branchgrpo.reference.errors import RewardError
from branchgrpo.reference.options import Fusion


def edge_scores(tree: Tree, depth: int) -> Float64[Tensor, "prompts nodes"] | None:
    """log p of the edges that end at a depth; None where the step is deterministic.  Clause: LOGP-6."""
    log_prob = tree.log_probs[depth - 1]
    return None if log_prob is None else log_prob.cpu()


def softmax_fusion(
    tree: Tree, rewards: Float64[Tensor, "prompts leaves models"], beta: float, *, subtree: bool
) -> Levels:
    """Bottom-up: each parent's value is the softmax-weighted mean of its children's values.

    Clause: FUSE-2, FUSE-3, FUSE-4.  With ``subtree`` a child is scored by β·log p + logsumexp of its own subtree:
    the path softmax, nested; without, by its own edge alone: the child softmax.  A single child hands its value on: the
    entries of both depths are one array.
    """
    values, log_sum = rewards, torch.zeros(rewards.shape[:2], dtype=torch.float64)
    prompts, models = rewards.shape[0], rewards.shape[2]
    levels = [values]
    for depth in range(tree.plan.steps, 0, -1):
        edges, factor = edge_scores(tree, depth), tree.plan.branching[depth - 1]
        scores = log_sum if edges is None else torch.add(log_sum, edges, alpha=beta)
        if factor > 1:
            siblings = scores.reshape(prompts, -1, factor)
            weights = torch.softmax(siblings, dim=-1).unsqueeze(-1)
            values = (weights * values.reshape(prompts, -1, factor, models)).sum(dim=2)
            scores = torch.logsumexp(siblings, dim=-1)
        log_sum = scores if subtree else torch.zeros_like(scores)
        levels.append(values)
    return tuple(reversed(levels))


def standardised_fusion(tree: Tree, rewards: Float64[Tensor, "prompts leaves models"], beta: float) -> Levels:
    """Path softmax of log-probabilities standardised within L(n) by the population std; uniform if equal (NORM-4).

    Clause: FUSE-5.
    """
    leaves = rewards.shape[1]
    scores = torch.zeros(rewards.shape[:2], dtype=torch.float64)
    levels = [rewards]
    for depth in range(tree.plan.steps, 0, -1):
        edges = edge_scores(tree, depth)
        if edges is not None:
            scores = scores + edges.repeat_interleave(leaves // edges.shape[1], dim=1)
        nodes = tree.plan.roots * tree.plan.level_sizes[depth - 1]
        mine = torch.unflatten(scores, 1, (nodes, leaves // nodes))
        centred = mine - mine.mean(dim=-1, keepdim=True)
        spread = centred.square().mean(dim=-1, keepdim=True).sqrt()
        equal = mine.amax(-1, keepdim=True) - mine.amin(-1, keepdim=True) <= EQUAL * mine.abs().amax(-1, keepdim=True)
        standard = torch.where(equal, torch.zeros_like(centred), centred / spread)
        weights = torch.softmax(beta * standard, dim=-1)
        levels.append((weights.unsqueeze(-1) * torch.unflatten(rewards, 1, (nodes, leaves // nodes))).sum(dim=2))
    return tuple(reversed(levels))


def fuse(tree: Tree, rewards: Float64[Tensor, "prompts leaves models"], options: Fusion) -> Levels:
    """r̄(n) = Σ_ℓ w_ℓ r_ℓ for every node, ``[prompts, R·n_d, models]``; a leaf keeps its own reward.

    Clause: FUSE-1 … FUSE-6.  Source: BranchGRPO Eq. 6.

    Args:
        tree: grown trees.
        rewards: M rewards a leaf, on any device; the values are on the CPU, as all that follows.
        options: estimator and β.

    Raises:
        RewardError: rewards that do not match the tree's leaves, or a non-finite one.
    """
    rewards = rewards.cpu()
    expected = tuple(tree.leaves.shape[:2])
    if tuple(rewards.shape[:2]) != expected:
        raise RewardError("rewards: shape", tuple(rewards.shape), f"{(*expected, 'models')}")
    finite = torch.isfinite(rewards)
    if not bool(finite.all()):
        prompt, leaf, model = torch.nonzero(~finite)[0].tolist()
        where = f"reward of leaf {leaf}, prompt {tree.prompts[prompt].id}, model {model}"
        raise RewardError(where, rewards[prompt, leaf, model].item(), "finite")
    if options.kind == "standardised":
        return standardised_fusion(tree, rewards, options.beta)
    return softmax_fusion(tree, rewards, options.beta, subtree=options.kind == "path_softmax")
