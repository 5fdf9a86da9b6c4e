"""Depth-wise advantages of all trees at once (spec: normalization)."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from branchgrpo.optimized.tree import Levels
from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.reference.options import Normalization
from branchgrpo.reference.plan import Plan

EQUAL = 2.0**-40
"""Relative spread up to which values count as equal (NORM-4)."""


def grouped(values: Float64[Tensor, "prompts roots nodes"], scope: str) -> Float64[Tensor, "groups members"]:
    """One row a group of a scope.  Clause: NORM-2."""
    prompts, roots, _ = values.shape
    groups = {"tree": prompts * roots, "prompt": prompts, "batch": 1}[scope]
    return values.reshape(groups, -1)


def degenerate(groups: Float64[Tensor, "groups members"]) -> Bool[Tensor, "groups 1"]:
    """One value, or max − min ≤ 2⁻⁴⁰ · max|r̄|, in every group.  Clause: NORM-4."""
    if groups.shape[1] == 1:
        return torch.ones(groups.shape, dtype=torch.bool)
    bottom, top = torch.aminmax(groups, dim=1, keepdim=True)
    return top - bottom <= torch.maximum(top, -bottom).mul_(EQUAL)


def standardise(
    values: Float64[Tensor, "prompts roots nodes"], options: Normalization
) -> Float64[Tensor, "prompts roots nodes"]:
    """A = (r̄ − mean) / (std + ε), exactly 0 where either group is degenerate.

    Clause: NORM-1, NORM-3, NORM-4.  Source: BranchGRPO Eq. 7; GRPO (arXiv 2402.03300) Eq. 4.
    """
    groups = grouped(values, options.std_scope)
    equal = degenerate(groups)
    deviation = groups - groups.mean(1, keepdim=True)
    members = max(groups.shape[1] - (1 if options.bessel else 0), 1)
    spread = torch.linalg.vector_norm(deviation, dim=1, keepdim=True).mul_(members**-0.5).add_(options.eps)
    if options.mean_scope == options.std_scope:
        return deviation.div_(spread).masked_fill_(equal, 0.0).reshape(values.shape)
    others = grouped(values, options.mean_scope)
    centred = (others - others.mean(1, keepdim=True)).masked_fill_(degenerate(others), 0.0).reshape(groups.shape)
    return centred.div_(spread).masked_fill_(equal, 0.0).reshape(values.shape)


def reward_weights(weights: Sequence[float], models: int) -> Float64[Tensor, "models"]:
    """The weights as float64, one finite real a reward model, not all 0 (NORM-5, REW-4, ERR-4)."""
    w = [float(weight) for weight in weights]
    if len(w) != models or not all(map(math.isfinite, w)) or not any(w):
        raise OptionError("weights", tuple(weights), f"{models} finite reals, one a reward model, not all 0")
    return torch.tensor(w, dtype=torch.float64)


def unclipped_level(
    level: Float64[Tensor, "prompts nodes models"],
    roots: int,
    weights: Float64[Tensor, "models"],
    options: Normalization,
) -> Float64[Tensor, "prompts nodes"]:
    """One depth: weighted sum over reward models of the advantages, before clipping.  Clause: NORM-5, NORM-6."""
    prompts, nodes, models = level.shape
    columns = level.reshape(prompts, roots, -1, models)
    if options.order == "sum_then_normalize":
        return standardise(columns @ weights, options).reshape(prompts, nodes)
    if models == 1:
        return (standardise(columns[..., 0], options) * weights).reshape(prompts, nodes)
    advantages = [standardise(columns[..., m], options) for m in range(models)]
    return (torch.stack(advantages, dim=-1) @ weights).reshape(prompts, nodes)


def by_array(function: Callable[[Tensor], Tensor], levels: Levels) -> Levels:
    """The function of every level; levels that are one array, as fusion leaves them between splits, have one result."""
    found: dict[int, Tensor] = {}
    for level in levels:
        if id(level) not in found:
            found[id(level)] = function(level)
    return tuple(found[id(level)] for level in levels)


def check_levels(plan: Plan, values: Levels) -> None:
    """One entry a depth, R·n_d nodes each.

    Raises:
        InputError: names the depth at fault.
    """
    if len(values) != plan.steps + 1:
        raise InputError("len(values)", len(values), f"T + 1 = {plan.steps + 1}, one entry a depth")
    for depth, (level, size) in enumerate(zip(values, plan.level_sizes, strict=True)):
        if level.shape[1] != plan.roots * size:
            raise InputError(f"values[{depth}].shape[1]", level.shape[1], f"R·n_d = {plan.roots * size}")


def unclipped_advantages(plan: Plan, values: Levels, weights: Sequence[float], options: Normalization) -> Levels:
    """Advantages of all depths before clipping; depths whose values are one array share one result.

    Clause: NORM-1 … NORM-6.
    """
    check_levels(plan, values)
    w = reward_weights(weights, values[0].shape[-1])
    return by_array(lambda level: unclipped_level(level, plan.roots, w, options), values)


def normalize(plan: Plan, values: Levels, weights: Sequence[float], options: Normalization) -> Levels:
    """Advantages ``[prompts, R·n_d]``: normalised a depth and reward model, summed, clipped once to ±A_max.

    Clause: NORM-1 … NORM-7.  Source: BranchGRPO Eq. 7; G²RPO Eq. 10.

    Args:
        plan: the plan of all trees.
        values: fused values ``[prompts, R·n_d, models]``.
        weights: M reward weights.
        options: scopes, std, ε, A_max, order.

    Returns:
        A of every depth, not to be changed in place: depths whose values are one array share one.
    """
    advantages = unclipped_advantages(plan, values, weights, options)
    return by_array(lambda level: level.clamp(-options.clip, options.clip), advantages)
