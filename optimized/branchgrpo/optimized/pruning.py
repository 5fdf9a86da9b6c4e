"""Pruning of the backward pass as masks over levels (spec: pruning)."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from branchgrpo.optimized.normalization import reward_weights, unclipped_level
from branchgrpo.optimized.tree import Levels
from branchgrpo.reference.errors import InputError, OptionError, PlanError, is_integer
from branchgrpo.reference.options import DepthWindow, ExtremeB, Normalization, ParentTop1, PruningRule
from branchgrpo.reference.plan import Plan

Masks = tuple[Bool[Tensor, "prompts _"], ...]
"""Entry d − 1 for child depth d: the edges that stay, ``[prompts, R·n_d]``."""


def leaf_keys(
    plan: Plan, values: Levels, weights: Sequence[float], options: Normalization
) -> Float64[Tensor, "prompts leaves"]:
    """Weighted sum of a leaf's advantages before clipping; with one reward model, the weighted reward itself.

    Clause: PRUNE-2.
    """
    w = reward_weights(weights, values[-1].shape[-1])
    if len(w) == 1:
        return values[-1] @ w
    return unclipped_level(values[-1], plan.roots, w, options)


def window_at(rule: DepthWindow, steps: int, iteration: int) -> range:
    """W(t): the window after m = min(⌊t/τ⌋, m_max) shifts, clipped to 1..T.

    Clause: PRUNE-5.  Source: BranchGRPO §3.4.

    Raises:
        OptionError: a window or stop outside 1..T, a stop that is passed from the start, or a negative iteration.
    """
    if not is_integer(iteration) or iteration < 0:
        raise OptionError("iteration", iteration, "an integer ≥ 0")
    stop = rule.stop if rule.stop is not None else (steps if rule.direction == 1 else 1)
    for name, value in (("start", rule.start), ("stop", stop)):
        if value > steps:
            raise OptionError(f"depth_window.{name}", value, f"in 1..{steps}")
    leading = rule.start + (rule.size - 1 if rule.direction == 1 else 0)
    room = (stop - leading) * rule.direction
    if room < 0:
        raise OptionError("depth_window.stop", stop, f"not passed by the leading depth {leading} at iteration 0")
    first = rule.start + rule.direction * min(iteration // rule.period, room)
    return range(max(first, 1), min(first + rule.size, steps + 1))


def staying_leaves(
    plan: Plan, keys: Float64[Tensor, "prompts leaves"], rule: ParentTop1 | ExtremeB
) -> Bool[Tensor, "prompts leaves"]:
    """The leaves that a width rule lets stay; the lower index wins among equals.

    Clause: PRUNE-2, PRUNE-3, PRUNE-4.  Source: BranchGRPO §3.4.

    Raises:
        PlanError: a plan without a split.
    """
    if not plan.splits:
        raise PlanError("splits", plan.splits, "not empty for width pruning")
    if isinstance(rule, ParentTop1):
        families = torch.unflatten(keys, 1, (-1, plan.branching[plan.splits[-1]]))
        best = families.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(families, dtype=torch.bool).scatter_(-1, best, True).flatten(1)
    trees = torch.unflatten(keys, 1, (plan.roots, plan.leaves))
    order = trees.sort(dim=-1, descending=True, stable=True).indices
    ends = torch.cat([order[..., : rule.b], order[..., -rule.b :]], dim=-1)
    return torch.zeros_like(trees, dtype=torch.bool).scatter_(-1, ends, True).flatten(1)


def every_edge(plan: Plan, prompts: int) -> Masks:
    """Masks that keep all edges; depths of one width share one array."""
    widths = [plan.roots * size for size in plan.level_sizes[1:]]
    full = {width: torch.ones(prompts, width, dtype=torch.bool) for width in set(widths)}
    return tuple(full[width] for width in widths)


def rule_masks(plan: Plan, keys: Float64[Tensor, "prompts leaves"], rule: PruningRule, iteration: int) -> Masks:
    """The edges that one rule leaves.  Clause: PRUNE-1, PRUNE-3, PRUNE-4, PRUNE-5."""
    full = every_edge(plan, len(keys))
    if isinstance(rule, DepthWindow):
        window = window_at(rule, plan.steps, iteration)
        return tuple(torch.zeros_like(mask) if depth in window else mask for depth, mask in enumerate(full, start=1))
    if not isinstance(rule, ParentTop1 | ExtremeB):
        raise OptionError("pruning", rule, "ParentTop1, ExtremeB or DepthWindow")
    stay = staying_leaves(plan, keys, rule)
    first = plan.splits[-1] + (1 if rule.drop_split_edges else 2)
    return tuple(stay if depth >= first else mask for depth, mask in enumerate(full, start=1))


def prune(plan: Plan, keys: Float64[Tensor, "prompts leaves"], rules: Sequence[PruningRule], iteration: int) -> Masks:
    """The edges that stay: all, less what any rule drops.

    Clause: PRUNE-1 … PRUNE-6.  Backward only; rules read rewards and depths alone, so their order does not matter.

    Args:
        plan: the plan of all trees.
        keys: for each leaf its key.
        rules: any of the rules.
        iteration: training iteration t ≥ 0, which moves depth windows.

    Returns:
        A mask a child depth, not to be changed in place: depths may share one.
    """
    if keys.shape[1] != plan.roots * plan.leaves:
        raise InputError("keys.shape[1]", keys.shape[1], f"R·N = {plan.roots * plan.leaves}")
    if not rules:
        return every_edge(plan, len(keys))
    kept = rule_masks(plan, keys, rules[0], iteration)
    for rule in rules[1:]:
        kept = tuple(a & b for a, b in zip(kept, rule_masks(plan, keys, rule, iteration), strict=True))
    return kept
