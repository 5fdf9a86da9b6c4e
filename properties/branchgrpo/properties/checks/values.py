"""Fused values and advantages: as defined, convex, permutable, invariant, and equal between implementations."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.properties.definitions import Array, advantages, as_arrays, conditioning, fused_values
from branchgrpo.properties.exact import all_close, as_array, at_most, elementwise, holds
from branchgrpo.properties.findings import Finding
from branchgrpo.properties.subject import Subject
from branchgrpo.properties.tolerances import EXACT, PARITY, convexity, normalised, shift_invariance
from branchgrpo.reference.implementation import Levels, Trace
from branchgrpo.reference.options import Fusion, Normalization
from branchgrpo.reference.plan import Plan

Rewards = Float64[Tensor, "prompts leaves models"]


def grouped(level: Array, plan: Plan) -> Array:
    """``[prompts, R·n, …]`` → ``[prompts, R, n, …]``."""
    return level.reshape(level.shape[0], plan.roots, -1, *level.shape[2:])


def magnitude(rewards: Rewards) -> float:
    """Largest |reward|: what the roundoff of a fused value is relative to."""
    return float(rewards.abs().max())


def fusion_as_defined(subject: Subject, trace: Trace, rewards: Rewards, options: Fusion) -> list[Finding]:
    """r̄ against its definition, and each leaf's own reward bit by bit (FUSE-1, FUSE-2, FUSE-4, FUSE-5)."""
    found = subject.implementation.fuse(trace, rewards, options)
    expected = fused_values(trace, as_array(rewards), options)
    same, size = torch.equal(found[-1].cpu(), rewards), magnitude(rewards)
    clauses = {"path_softmax": "FUSE-2", "child_softmax": "FUSE-4", "standardised": "FUSE-5"}
    name = f"{subject.name}, fusion"
    return [
        all_close(
            f"{name}, {options.kind}: as defined", f"FUSE-1 {clauses[options.kind]}", found, expected, PARITY, size
        ),
        holds(f"{name}: a leaf keeps its reward", "FUSE-1", [same]),
    ]


def convexity_error(trace: Trace, values: Levels, rewards: Array) -> float:
    """How far values leave the range of their leaves, relative to the largest of them, in units of the tolerance."""
    worst = 0.0
    for level in as_arrays(values):
        mine = rewards.reshape(*level.shape[:2], -1, rewards.shape[-1])
        low, high = mine.min(axis=2), mine.max(axis=2)
        scale = np.maximum(np.abs(low), np.abs(high))
        outside = np.maximum(np.maximum(low - level, level - high), 0.0)
        relative = np.divide(outside, scale, out=np.zeros_like(outside), where=scale > 0.0)
        worst = max(worst, float(relative.max()))
    return worst


def fusion_is_convex(subject: Subject, trace: Trace, rewards: Rewards, options: Fusion) -> list[Finding]:
    """Every fused value lies between the least and the largest reward of its leaves, to rounding (FUSE-1)."""
    values = subject.implementation.fuse(trace, rewards, options)
    error = convexity_error(trace, values, as_array(rewards))
    name = f"{subject.name}, fusion: between its leaves' rewards"
    return [at_most(name, "FUSE-1", error, convexity(trace.plan.leaves), sum(v.numel() for v in values))]


def nested_softmax(trace: Trace, rewards: Array) -> list[Array]:
    """r̄ at β = 1 by evidence: children scored by log p(b) + logsumexp of what is below them, bottom-up (FUSE-3)."""
    plan, prompts = trace.plan, len(trace.prompts)
    evidence = np.zeros((prompts, plan.roots * plan.leaves))
    levels = [rewards]
    for depth in range(plan.steps, 0, -1):
        edges = trace.log_probs[depth - 1]
        score = evidence if edges is None else evidence + as_array(edges)
        groups = score.reshape(prompts, -1, plan.branching[depth - 1])
        top = groups.max(axis=2, keepdims=True)
        mass = np.exp(groups - top)
        total = mass.sum(axis=2, keepdims=True)
        below = levels[0].reshape(*groups.shape, -1)
        levels.insert(0, np.einsum("pnk,pnkm->pnm", mass / total, below))
        evidence = (np.log(total) + top)[..., 0]
    return levels


def fusion_is_nested(subject: Subject, trace: Trace, rewards: Rewards) -> list[Finding]:
    """The path softmax at β = 1 is a nested softmax over children (FUSE-3).

    The tolerance grows with the log-probabilities: both ways add them up in different orders.
    """
    found = subject.implementation.fuse(trace, rewards, Fusion("path_softmax", 1.0))
    scale = max([1.0, *(float(edges.abs().max()) for edges in trace.log_probs if edges is not None)])
    name, nested = f"{subject.name}, fusion: path softmax is nested", nested_softmax(trace, as_array(rewards))
    return [all_close(name, "FUSE-3", found, nested, PARITY * scale, magnitude(rewards))]


def fusion_limits(subject: Subject, trace: Trace, rewards: Rewards, kind: Fusion) -> list[Finding]:
    """β = 0 is the mean of the leaves; at a huge β the likeliest leaf takes all (FUSE-6, FUSE-2).

    The second is judged where one leaf leads: by 1 in units of log p (or of the standardised score, whose spread is
    at least that of two points).
    """
    table, plan = as_array(rewards), trace.plan
    uniform = subject.implementation.fuse(trace, rewards, replace(kind, beta=0.0))
    means = [table.reshape(len(table), plan.roots * n, -1, table.shape[2]).mean(axis=2) for n in plan.level_sizes]
    size = magnitude(rewards)
    found = [all_close(f"{subject.name}, fusion: β = 0 is the mean", "FUSE-6", uniform, means, PARITY, size)]
    if kind.kind == "path_softmax":
        sharp = subject.implementation.fuse(trace, rewards, replace(kind, beta=1e6))
        expected = fused_values(trace, table, replace(kind, beta=1e6))
        limit = all_close(f"{subject.name}, fusion: β → ∞ takes the likeliest", "FUSE-2", sharp, expected, PARITY, size)
        found.append(limit)
    return found


def normalised_as_defined(
    subject: Subject, plan: Plan, values: Levels, weights: Sequence[float], options: Normalization
) -> list[Finding]:
    """A against its definition (NORM-1 … NORM-6)."""
    found = subject.implementation.normalize(plan, values, weights, options)
    expected = advantages(plan, as_arrays(values), weights, options)
    name = f"{subject.name}, advantages: as defined"
    scales = conditioning(plan, as_arrays(values), weights, options)
    return [elementwise(name, "NORM-1 NORM-2 NORM-3 NORM-4 NORM-5 NORM-6", found, expected, scales, PARITY)]


def standard_scores(subject: Subject, plan: Plan, values: Levels) -> list[Finding]:
    """With one reward and the tree scopes: mean 0 and std 1 at every depth that is not degenerate (NORM-1, NORM-3)."""
    options = Normalization(clip=float("inf"))
    levels = as_arrays(subject.implementation.normalize(plan, values, (1.0,), options))
    error, count = 0.0, 1
    for level, before in zip(levels, as_arrays(values), strict=True):
        groups, source = grouped(level, plan), grouped(before[..., 0], plan)
        real = source.std(axis=2) >= 0.1
        if groups.shape[2] > 1 and real.any():
            count = max(count, groups.shape[2])
            spread = np.abs(groups.std(axis=2, ddof=1) - 1.0)
            error = max(error, float(np.abs(groups.mean(axis=2))[real].max()), float(spread[real].max()))
    name = f"{subject.name}, advantages: mean 0 and std 1 a depth"
    return [at_most(name, "NORM-1 NORM-3", error, normalised(count), len(levels))]


def bounds(subject: Subject, plan: Plan, values: Levels) -> list[Finding]:
    """|A| ≤ (n − 1)/√n for n nodes, and ±1/√2 for two of them that differ (NORM-7); ±A_max after the clip (NORM-6)."""
    levels = as_arrays(subject.implementation.normalize(plan, values, (1.0,), Normalization(clip=float("inf"))))
    clipped = subject.implementation.normalize(plan, values, (1.0,), Normalization(clip=0.5))
    sizes = plan.level_sizes
    excess = max(float(np.abs(level).max()) - (n - 1) / np.sqrt(n) for level, n in zip(levels, sizes, strict=True))
    pairs = [np.abs(level[level != 0.0]) for level, n in zip(levels, sizes, strict=True) if n == 2]
    apart = max((float(np.abs(pair - np.sqrt(0.5)).max()) for pair in pairs if pair.size), default=0.0)
    name = f"{subject.name}, advantages"
    tolerance = normalised(plan.leaves)
    return [
        at_most(f"{name}: at most (n − 1)/√n", "NORM-7", max(excess, 0.0), tolerance, len(levels)),
        at_most(f"{name}: two nodes give ±1/√2", "NORM-7", apart, tolerance, max(1, len(pairs))),
        holds(f"{name}: clipped once to ±A_max", "NORM-6", [bool((a.abs() <= 0.5).all()) for a in clipped]),
    ]


def equal_rewards_are_zero(subject: Subject, trace: Trace, value: float, options: Fusion) -> list[Finding]:
    """Equal rewards give advantages of exactly 0, whatever rounding fusion adds (NORM-4)."""
    plan = trace.plan
    rewards = torch.full((len(trace.prompts), plan.roots * plan.leaves, 1), value, dtype=torch.float64)
    values = subject.implementation.fuse(trace, rewards, options)
    found = subject.implementation.normalize(plan, values, (1.0,), Normalization())
    error = max(float(level.abs().max()) for level in found)
    name = f"{subject.name}, advantages: equal rewards are 0"
    return [at_most(name, "NORM-4", error, EXACT, sum(a.numel() for a in found))]


def reward_changes(
    subject: Subject, trace: Trace, rewards: Rewards, options: Fusion, shift: float, factor: float
) -> list[Finding]:
    """Adding a constant and multiplying by a positive one leave advantages, to rounding and ε (NORM-7).

    With ε = 0, so that only rounding is left.  Rewards are ordinary: integers, whose spread in a tree is at least 1;
    a fused level may be flatter, so levels of spread below 0.1 are left out.
    """
    plan, how = trace.plan, Normalization(eps=0.0, clip=float("inf"))

    def run(table: Rewards) -> tuple[list[Array], list[Array]]:
        values = subject.implementation.fuse(trace, table, options)
        return as_arrays(values), as_arrays(subject.implementation.normalize(plan, values, (1.0,), how))

    before, base = run(rewards)
    errors = {}
    for title, table in (("shift", rewards + shift), ("scale", rewards * factor)):
        _, moved = run(table)
        worst = 0.0
        for source, a, b in zip(before, base, moved, strict=True):
            level = grouped(source[..., 0], plan)
            real = (level.max(axis=2) - level.min(axis=2)) >= 0.1
            if real.any():
                worst = max(worst, float(np.abs(grouped(a, plan) - grouped(b, plan))[real].max()))
        errors[title] = worst
    top = max(abs(shift), float(rewards.abs().max()))
    name, count = f"{subject.name}, advantages", sum(a.size for a in base)
    tolerance = shift_invariance(top, 0.1, plan.leaves)
    return [
        at_most(f"{name}: unmoved by a constant", "NORM-7", errors["shift"], tolerance, count),
        at_most(f"{name}: unmoved by a factor", "NORM-7", errors["scale"], tolerance, count),
    ]


def leaf_permutation(plan: Plan, step: int, order: Sequence[int], depth: int) -> np.ndarray:
    """Where the nodes of a depth come from when the children of every node of depth ``step`` are put in ``order``."""
    width = plan.level_sizes[depth]
    if depth <= step:
        return np.arange(width)
    tail = width // (plan.level_sizes[step] * plan.branching[step])
    index = np.arange(width).reshape(plan.level_sizes[step], plan.branching[step], tail)
    return index[:, list(order)].reshape(-1)


def permuted(level: Tensor, plan: Plan, index: np.ndarray) -> Tensor:
    """A level with the nodes of every root re-ordered."""
    rows = level.reshape(level.shape[0], plan.roots, -1, *level.shape[2:])
    return rows[:, :, torch.from_numpy(index)].reshape(level.shape)


def prompt_order(
    subject: Subject, trace: Trace, rewards: Rewards, fusion: Fusion, options: Normalization, order: Sequence[int]
) -> list[Finding]:
    """Re-ordering prompts re-orders values and advantages in the same way, whatever the scopes (FUSE-1, NORM-2)."""
    index, weights = torch.tensor(list(order)), (1.0,) * rewards.shape[2]
    scores = tuple(None if edges is None else edges[index] for edges in trace.log_probs)
    prompts = tuple(trace.prompts[i] for i in order)
    states, means = (tuple(level[index] for level in levels) for levels in (trace.states, trace.means))
    turned = replace(trace, prompts=prompts, states=states, means=means, log_probs=scores)
    values = subject.implementation.fuse(trace, rewards, fusion)
    expected = [level[index] for level in values]
    moved = subject.implementation.fuse(turned, rewards[index], fusion)
    base = subject.implementation.normalize(trace.plan, values, weights, options)
    again = subject.implementation.normalize(trace.plan, tuple(expected), weights, options)
    scales = conditioning(trace.plan, as_arrays(tuple(expected)), weights, options)
    name = f"{subject.name}, prompts re-ordered"
    return [
        all_close(f"{name}: values follow", "FUSE-1", moved, expected, PARITY, magnitude(rewards)),
        elementwise(f"{name}: advantages follow", "NORM-2", again, [a[index] for a in base], scales, PARITY),
    ]


def sibling_order(
    subject: Subject, trace: Trace, rewards: Rewards, options: Fusion, step: int, order: Sequence[int]
) -> list[Finding]:
    """Re-ordering siblings (with all below them) re-orders values and advantages in the same way."""
    plan, how = trace.plan, Normalization()
    index = [leaf_permutation(plan, step, order, depth) for depth in range(plan.steps + 1)]
    scores = tuple(
        None if edges is None else permuted(edges, plan, at)
        for edges, at in zip(trace.log_probs, index[1:], strict=True)
    )
    weights = (1.0,) * rewards.shape[2]
    values = subject.implementation.fuse(trace, rewards, options)
    moved = subject.implementation.fuse(replace(trace, log_probs=scores), permuted(rewards, plan, index[-1]), options)
    expected = [permuted(level, plan, at) for level, at in zip(values, index, strict=True)]
    base = subject.implementation.normalize(plan, tuple(values), weights, how)
    again = subject.implementation.normalize(plan, tuple(expected), weights, how)
    scales = conditioning(plan, as_arrays(tuple(expected)), weights, how)
    turned = [permuted(level, plan, at) for level, at in zip(base, index, strict=True)]
    name = f"{subject.name}, siblings re-ordered"
    return [
        all_close(f"{name}: values follow", "FUSE-1", moved, expected, PARITY, magnitude(rewards)),
        elementwise(f"{name}: advantages follow", "NORM-1", again, turned, scales, PARITY),
    ]
