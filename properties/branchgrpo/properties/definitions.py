"""Fusion, normalization and pruning as their clauses define them, on arrays: a third way to the same numbers."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float64

from branchgrpo.reference.implementation import Levels, Trace
from branchgrpo.reference.options import DepthWindow, ExtremeB, Fusion, Normalization, ParentTop1, PruningRule
from branchgrpo.reference.plan import Plan

Array = Float64[np.ndarray, "..."]


def softmax(scores: Array) -> Array:
    """Softmax along the last axis."""
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def edge_scores(trace: Trace) -> list[Array]:
    """Log-probabilities as arrays, 0 where an edge has none; entry d − 1 for depth d."""
    widths = [trace.plan.roots * n for n in trace.plan.level_sizes[1:]]
    return [
        np.zeros((len(trace.prompts), n)) if log_prob is None else log_prob.detach().cpu().numpy()
        for n, log_prob in zip(widths, trace.log_probs, strict=True)
    ]


def path_scores(trace: Trace, depth: int) -> Array:
    """log p(ℓ | n) for the nodes of a depth and the leaves under each: ``[prompts, nodes, leaves of a node]``."""
    plan = trace.plan
    total = np.zeros((len(trace.prompts), plan.roots * plan.leaves))
    for d, scores in enumerate(edge_scores(trace), start=1):
        if d > depth:
            total = total + np.repeat(scores, plan.leaves // plan.level_sizes[d], axis=1)
    return total.reshape(len(trace.prompts), plan.roots * plan.level_sizes[depth], -1)


def leaf_weights(trace: Trace, depth: int, options: Fusion) -> Array:
    """w of the leaves under each node of a depth (FUSE-2, FUSE-4, FUSE-5)."""
    scores = path_scores(trace, depth)
    if options.kind == "path_softmax":
        return softmax(options.beta * scores)
    if options.kind == "standardised":
        centred = scores - scores.mean(axis=-1, keepdims=True)
        spread = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True))
        apart = np.ptp(scores, axis=-1, keepdims=True) > 2.0**-40 * np.abs(scores).max(axis=-1, keepdims=True)
        return softmax(options.beta * np.divide(centred, spread, out=np.zeros_like(centred), where=apart))
    plan, prompts = trace.plan, len(trace.prompts)
    weights = np.ones((prompts, plan.roots * plan.level_sizes[depth], 1))
    for d, edges in enumerate(edge_scores(trace), start=1):
        if d > depth:
            children = softmax(options.beta * edges.reshape(prompts, -1, plan.branching[d - 1]))
            children = children.reshape(prompts, weights.shape[1], weights.shape[2], -1)
            weights = (weights[..., None] * children).reshape(prompts, weights.shape[1], -1)
    return weights


def fused_values(trace: Trace, rewards: Array, options: Fusion) -> list[Array]:
    """r̄ of every node, ``[prompts, R·n_d, models]`` (FUSE-1)."""
    levels = []
    for depth in range(trace.plan.steps + 1):
        weights = leaf_weights(trace, depth, options)
        mine = rewards.reshape(*weights.shape, -1)
        levels.append(np.einsum("pnl,pnlm->pnm", weights, mine))
    return levels


def normalised_level(values: Array, options: Normalization) -> Array:
    """A of one depth and one column, ``[prompts, roots, nodes]`` (NORM-1 … NORM-4)."""
    centre, spread = level_axes(options)

    def degenerate(axis: tuple[int, ...]) -> Bool[np.ndarray, "..."]:
        count = np.prod([values.shape[a] for a in axis])
        low, high = (f(values, axis=axis, keepdims=True) for f in (np.min, np.max))
        top = np.abs(values).max(axis=axis, keepdims=True)
        return np.asarray((high - low <= 2.0**-40 * top) | (count < 2))

    count = int(np.prod([values.shape[a] for a in spread]))
    std = np.std(values, axis=spread, keepdims=True, ddof=1 if options.bessel and count > 1 else 0)
    zero = np.broadcast_to(degenerate(centre) | degenerate(spread), values.shape)
    scaled = (values - values.mean(axis=centre, keepdims=True)) / (std + options.eps)
    return np.asarray(np.where(zero, 0.0, scaled))


def level_axes(options: Normalization) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Axes of ``[prompts, roots, nodes]`` that the mean's and the std's scope run over (NORM-2)."""
    axes = {"tree": (2,), "prompt": (1, 2), "batch": (0, 1, 2)}
    return axes[options.mean_scope], axes[options.std_scope]


def conditioning_level(values: Array, magnitude: Array, options: Normalization) -> Array:
    """How much roundoff of values grows in A: max |value| of the mean's set over the std of the std's set.

    Args:
        values: ``[prompts, roots, nodes]``.
        magnitude: magnitudes of what the values were summed from, of the same shape.
        options: the scopes.
    """
    centre, spread = level_axes(options)
    top = np.maximum(np.abs(magnitude).max(axis=centre, keepdims=True), np.abs(values).max(axis=spread, keepdims=True))
    std = np.std(values, axis=spread, keepdims=True)
    ratio = np.divide(top, std, out=np.zeros(np.broadcast_shapes(top.shape, std.shape)), where=std > 0.0)
    return np.asarray(np.broadcast_to(ratio, values.shape))


def conditioning(plan: Plan, values: Sequence[Array], weights: Sequence[float], options: Normalization) -> list[Array]:
    """1 + the growth of roundoff in every A, ``[prompts, R·n_d]`` a depth."""
    levels, absolute = [], np.abs(np.asarray(weights))
    for level in values:
        columns = level.reshape(level.shape[0], plan.roots, -1, level.shape[-1])
        if options.order == "sum_then_normalize":
            growth = conditioning_level(columns @ np.asarray(weights), np.abs(columns) @ absolute, options)
        else:
            parts = [conditioning_level(columns[..., m], columns[..., m], options) for m in range(len(weights))]
            growth = np.sum([w * part for w, part in zip(absolute, parts, strict=True)], axis=0)
        levels.append(1.0 + growth.reshape(level.shape[:2]))
    return levels


def unclipped(plan: Plan, values: Sequence[Array], weights: Sequence[float], options: Normalization) -> list[Array]:
    """Weighted sum of the models' advantages before the clip (NORM-5)."""
    levels = []
    for level in values:
        columns = level.reshape(level.shape[0], plan.roots, -1, level.shape[-1])
        if options.order == "sum_then_normalize":
            columns = columns @ np.asarray(weights)[:, None]
            parts = [normalised_level(columns[..., 0], options)]
        else:
            parts = [w * normalised_level(columns[..., m], options) for m, w in enumerate(weights)]
        levels.append(np.sum(parts, axis=0).reshape(level.shape[:2]))
    return levels


def advantages(plan: Plan, values: Sequence[Array], weights: Sequence[float], options: Normalization) -> list[Array]:
    """A of every node (NORM-6)."""
    return [np.clip(a, -options.clip, options.clip) for a in unclipped(plan, values, weights, options)]


def window(rule: DepthWindow, steps: int, iteration: int) -> set[int]:
    """Depths that the window holds at an iteration (PRUNE-5): shifted one by one until the next shift would pass."""
    stop = rule.stop if rule.stop is not None else (steps if rule.direction == 1 else 1)
    first = rule.start
    for _ in range(iteration // rule.period):
        leading = first + rule.size if rule.direction == 1 else first - 1
        if leading * rule.direction > stop * rule.direction:
            break
        first += rule.direction
    return {d for d in range(first, first + rule.size) if 1 <= d <= steps}


def staying(plan: Plan, keys: Array, rule: ParentTop1 | ExtremeB) -> set[int]:
    """Leaves of one tree that a width rule lets stay (PRUNE-3, PRUNE-4); ``keys`` of that tree."""
    order = sorted(range(plan.leaves), key=lambda leaf: (-keys[leaf], leaf))
    if isinstance(rule, ExtremeB):
        return {*order[: rule.b], *order[-rule.b :]}
    factor = plan.branching[plan.splits[-1]]
    best: dict[int, int] = {}
    for leaf in order:
        best.setdefault(leaf // factor, leaf)
    return set(best.values())


def kept_edges(plan: Plan, keys: Array, rules: Sequence[PruningRule], iteration: int) -> list[Bool[np.ndarray, "..."]]:
    """Edges that stay, entry d − 1 for child depth d, ``[prompts, R·n_d]`` (PRUNE-1 … PRUNE-5)."""
    trees = keys.reshape(-1, plan.leaves)
    masks = [np.ones((len(trees), n), dtype=bool) for n in plan.level_sizes[1:]]
    for rule in rules:
        if isinstance(rule, DepthWindow):
            for depth in window(rule, plan.steps, iteration):
                masks[depth - 1][:] = False
            continue
        first = plan.splits[-1] + (1 if rule.drop_split_edges else 2)
        for tree, own in enumerate(trees):
            leaves = staying(plan, own, rule)
            for depth in range(first, plan.steps + 1):
                for leaf in set(range(plan.leaves)) - leaves:
                    masks[depth - 1][tree, leaf] = False
    return [mask.reshape(keys.shape[0], -1) for mask in masks]


def as_arrays(levels: Levels) -> list[Array]:
    """Levels as float64 arrays."""
    return [level.detach().cpu().double().numpy() for level in levels]
