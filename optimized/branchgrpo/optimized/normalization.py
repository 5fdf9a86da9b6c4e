"""Depth-wise advantages of all trees at once (spec: normalization)."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from branchgrpo.optimized.tree import Levels
from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.reference.options import Normalization
from branchgrpo.reference.plan import Plan

EQUAL = 2.0**-40
"""Relative spread up to which values count as equal (NORM-4)."""

SCOPE_DIMS = {"tree": (2,), "prompt": (1, 2), "batch": (0, 1, 2)}
"""Dimensions of ``[prompts, roots, nodes]`` over which a scope reaches (NORM-2)."""


def degenerate(values: Float64[Tensor, "prompts roots nodes"], scope: str) -> Bool[Tensor, "_ _ _"]:
    """One value, or max − min ≤ 2⁻⁴⁰ · max|r̄|, in every group of the scope.  Clause: NORM-4."""
    dims = SCOPE_DIMS[scope]
    top, bottom = values.amax(dims, keepdim=True), values.amin(dims, keepdim=True)
    alone = values.numel() == top.numel()
    return (top - bottom <= EQUAL * torch.maximum(top.abs(), bottom.abs())) | alone


def standardise(
    values: Float64[Tensor, "prompts roots nodes"], options: Normalization
) -> Float64[Tensor, "prompts roots nodes"]:
    """A = (r̄ − mean) / (std + ε), exactly 0 where either group is degenerate.

    Clause: NORM-1, NORM-3, NORM-4.  Source: BranchGRPO Eq. 7; GRPO (arXiv 2402.03300) Eq. 4.
    """
    dims, correction = SCOPE_DIMS[options.std_scope], 1 if options.bessel else 0
    equal = degenerate(values, options.mean_scope) | degenerate(values, options.std_scope)
    mean = values.mean(SCOPE_DIMS[options.mean_scope], keepdim=True)
    centre = values.mean(dims, keepdim=True)
    squares = (values - centre).square().sum(dims, keepdim=True)
    std = (squares / max(values.numel() // centre.numel() - correction, 1)).sqrt()
    advantages = (values - mean) / torch.where(equal, 1.0, std + options.eps)
    return torch.where(equal, 0.0, advantages)


def reward_weights(weights: Sequence[float], models: int) -> Float64[Tensor, "models"]:
    """The weights as float64, one finite real a reward model, not all 0 (NORM-5, REW-4, ERR-4)."""
    w = torch.tensor(list(weights), dtype=torch.float64)
    if w.shape != (models,) or not bool(torch.isfinite(w).all()) or not bool(w.any()):
        raise OptionError("weights", tuple(weights), f"{models} finite reals, one a reward model, not all 0")
    return w


def unclipped_level(
    level: Float64[Tensor, "prompts nodes models"],
    roots: int,
    weights: Float64[Tensor, "models"],
    options: Normalization,
) -> Float64[Tensor, "prompts nodes"]:
    """One depth: weighted sum over reward models of the advantages, before clipping.  Clause: NORM-5, NORM-6."""
    columns = torch.unflatten(level, 1, (roots, -1))
    if options.order == "sum_then_normalize":
        return standardise(columns @ weights, options).flatten(1)
    advantages = [standardise(columns[..., m], options) for m in range(len(weights))]
    return (torch.stack(advantages, dim=-1) @ weights).flatten(1)


def check_levels(plan: Plan, values: Levels) -> None:
    """One entry a depth, R·n_d nodes each.

    Raises:
        InputError: names the depth at fault.
    """
    if len(values) != plan.steps + 1:
        raise InputError("len(values)", len(values), f"T + 1 = {plan.steps + 1}, one entry a depth")
    for depth, level in enumerate(values):
        if level.shape[1] != plan.roots * plan.level_sizes[depth]:
            raise InputError(
                f"values[{depth}].shape[1]", level.shape[1], f"R·n_d = {plan.roots * plan.level_sizes[depth]}"
            )


def unclipped_advantages(plan: Plan, values: Levels, weights: Sequence[float], options: Normalization) -> Levels:
    """Advantages of all depths before clipping.  Clause: NORM-1 … NORM-6."""
    check_levels(plan, values)
    w = reward_weights(weights, values[0].shape[-1])
    return tuple(unclipped_level(level, plan.roots, w, options) for level in values)


def normalize(plan: Plan, values: Levels, weights: Sequence[float], options: Normalization) -> Levels:
    """Advantages ``[prompts, R·n_d]``: normalised a depth and reward model, summed, clipped once to ±A_max.

    Clause: NORM-1 … NORM-7.  Source: BranchGRPO Eq. 7; G²RPO Eq. 10.

    Args:
        plan: the plan of all trees.
        values: fused values ``[prompts, R·n_d, models]``.
        weights: M reward weights.
        options: scopes, std, ε, A_max, order.
    """
    advantages = unclipped_advantages(plan, values, weights, options)
    return tuple(level.clamp(-options.clip, options.clip) for level in advantages)
