"""Singular stochastic sampling with shared work, and multi-granularity advantages (spec: singular, granularity)."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.optimized.normalization import reward_weights, unclipped_level
from branchgrpo.optimized.ranks import Ranks
from branchgrpo.optimized.rollout import rollouts
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.optimized.tree import Levels, Tree
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.options import Normalization
from branchgrpo.reference.protocols import Condition, Prompt, VelocityModel

FamilyTrees = dict[tuple[int, int], Tree]
"""The trees of every member (k, λ); equal states are one array."""


def singular_rollout(
    family: PlanFamily,
    model: VelocityModel,
    prompts: Sequence[Prompt],
    condition: Condition,
    sampling: Sampling,
    *,
    ranks: Ranks | None = None,
) -> FamilyTrees:
    """Roll out every member of the family for all prompts, equal inputs called once.

    Clause: SING-1 … SING-4, GRAN-3.  One anchor, stopped at max M; for each k one set of children from the anchor's
    own velocity; continuations that agree so far share states and calls.  Source: G²RPO §3.2, Algorithm 1.

    Args, raises: as ``rollouts``.
    """
    members = list(family.members())
    plans = [family.member(*member) for member in members]
    trees = rollouts(plans, model, prompts, condition, sampling, ranks=ranks)
    return dict(zip(members, trees, strict=True))


def multi_granularity_advantages(
    family: PlanFamily, k: int, values: Mapping[int, Levels], weights: Sequence[float], options: Normalization
) -> Levels:
    """A of step k's children: a z-score a granularity (and reward), summed over Λ, clipped once.

    Clause: GRAN-4, GRAN-5.  Source: G²RPO Eq. 9–10.

    Args:
        family: k and Λ.
        k: the perturbed step.
        values: for every λ the fused values of member (k, λ).
        weights: M reward weights.
        options: scopes, std, ε, A_max.

    Returns:
        Advantages in the shape of member (k, λ₀), λ₀ the first granularity: those of the children at depth k + 1, and
        0 at every other depth, whose edges are deterministic.
    """
    first, *_ = family.granularities
    w = reward_weights(weights, values[first][0].shape[-1])
    total = torch.zeros(values[first][k + 1].shape[:2], dtype=torch.float64)
    for granularity in family.granularities:
        total = total + unclipped_level(values[granularity][k + 1], family.roots, w, options)
    children: Float64[Tensor, "prompts children"] = total.clamp(-options.clip, options.clip)
    return tuple(
        children if depth == k + 1 else torch.zeros(level.shape[:2], dtype=torch.float64)
        for depth, level in enumerate(values[first])
    )
