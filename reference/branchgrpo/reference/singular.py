"""Singular stochastic sampling and multi-granularity advantages (spec: singular, granularity)."""

from collections.abc import Sequence

import torch

from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.normalization import NodeAdvantages, unclipped_advantages
from branchgrpo.reference.options import Normalization
from branchgrpo.reference.protocols import Condition, Prompt, VelocityModel
from branchgrpo.reference.reward import NodeValues
from branchgrpo.reference.rollout import Sampling, rollout
from branchgrpo.reference.tree import Node, Tree
from branchgrpo.reference.velocity import CalledOnce

FamilyTrees = dict[tuple[int, int], list[Tree]]
"""The trees of every member (k, λ), in one order for all members."""


def singular_rollout(
    family: PlanFamily, model: VelocityModel, prompt: Prompt, condition: Condition, sampling: Sampling
) -> FamilyTrees:
    """Roll out every member of the family for one prompt.

    Clause: SING-1 … SING-4, GRAN-3, GRAN-6.  Source: G²RPO §3.2, Algorithm 1.

    The members share the anchor and, for one k, the children: their noise has the same keys and everything else is
    deterministic. Each is rolled out by itself; what another has called already is not called again.
    """
    once = CalledOnce(model)
    return {
        (k, granularity): rollout(family.member(k, granularity), once, prompt, condition, sampling)
        for k, granularity in family.members()
    }


def perturbed_edges(tree: Tree, k: int) -> list[Node]:
    """The G children of step k: the only edges with a log-probability.  Clause: SING-2."""
    return tree.level(k + 1)


def multi_granularity_advantages(
    family: PlanFamily,
    k: int,
    trees: FamilyTrees,
    values: NodeValues,
    weights: Sequence[float],
    options: Normalization,
) -> NodeAdvantages:
    """A of step k's children: a within-group z-score a granularity (and reward), summed over Λ, clipped once.

    Clause: GRAN-4 … GRAN-6, DIV-G2.  Source: G²RPO Eq. 9–10.

    Args:
        family: k and Λ.
        k: the perturbed step.
        trees: of every member; for several prompts, the prompts' trees one after the other.
        values: fused values of every tree's nodes; a child's is its leaf's reward.
        weights: M reward weights.
        options: scopes, std, ε, A_max.

    Returns:
        Advantages of the children in the trees of (k, λ₀), λ₀ the first granularity: the trees that are trained.
    """
    first, *_ = family.granularities
    children = [child for tree in trees[k, first] for child in perturbed_edges(tree, k)]
    total = {child: torch.zeros((), dtype=torch.float64) for child in children}
    for granularity in family.granularities:
        own = trees[k, granularity]
        mine = {node: values[node] for tree in own for node in tree.root.walk()}
        advantages = unclipped_advantages(own, mine, weights, options)
        twins = [child for tree in own for child in perturbed_edges(tree, k)]
        for child, twin in zip(children, twins, strict=True):
            total[child] = total[child] + advantages[twin]
    return {child: a.clamp(-options.clip, options.clip) for child, a in total.items()}
