"""Pruning: as defined, idempotent, free of order, a subset, and backward only."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.properties.definitions import as_arrays, conditioning, kept_edges, unclipped
from branchgrpo.properties.exact import as_array, elementwise, holds
from branchgrpo.properties.findings import Finding
from branchgrpo.properties.subject import Subject
from branchgrpo.properties.tolerances import PARITY
from branchgrpo.reference.implementation import Levels, Masks, Trace
from branchgrpo.reference.options import DepthWindow, Fusion, Normalization, PruningRule
from branchgrpo.reference.plan import Plan

Keys = Float64[Tensor, "prompts leaves"]


def same_masks(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether two sets of masks are equal."""
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


def size(masks: Masks) -> int:
    """Number of edges."""
    return sum(mask.numel() for mask in masks)


def pruning_as_defined(
    subject: Subject, plan: Plan, keys: Keys, rules: tuple[PruningRule, ...], iteration: int
) -> list[Finding]:
    """Kept edges against their definition (PRUNE-1 … PRUNE-5)."""
    found = subject.implementation.prune(plan, keys, rules, iteration)
    expected = [torch.from_numpy(mask) for mask in kept_edges(plan, as_array(keys), rules, iteration)]
    same = same_masks(found, expected)
    clause = "PRUNE-1 PRUNE-2 PRUNE-3 PRUNE-4 PRUNE-5"
    return [holds(f"{subject.name}, pruning: as defined", clause, [same], size(found))]


def keys_as_defined(
    subject: Subject, plan: Plan, values: Levels, weights: Sequence[float], options: Normalization
) -> list[Finding]:
    """Keys: unclipped advantages, or with one model the weighted reward itself (PRUNE-2)."""
    found = subject.implementation.leaf_keys(plan, values, weights, options)
    arrays = as_arrays(values)
    single = len(weights) == 1
    expected = weights[0] * arrays[-1][..., 0] if single else unclipped(plan, arrays, weights, options)[-1]
    growth = conditioning(plan, arrays, weights, options)[-1]
    scale = np.maximum(np.abs(expected), 1.0) if single else growth
    return [elementwise(f"{subject.name}, pruning: leaf keys", "PRUNE-2", [found], [expected], [scale], PARITY)]


def pruning_algebra(
    subject: Subject, plan: Plan, keys: Keys, rules: tuple[PruningRule, ...], iteration: int
) -> list[Finding]:
    """Twice the rules is once, their order is free, more rules keep fewer edges, none keeps all (PRUNE-1)."""

    def prune(some: tuple[PruningRule, ...]) -> Masks:
        return subject.implementation.prune(plan, keys, some, iteration)

    once, everything = prune(rules), prune(())
    parts = [prune((rule,)) for rule in rules]
    meet = tuple(torch.stack(level).all(dim=0) for level in zip(*parts, strict=True))
    name, n = f"{subject.name}, pruning", size(once)
    return [
        holds(f"{name}: idempotent", "PRUNE-1", [same_masks(prune((*rules, *rules)), once)], n),
        holds(f"{name}: order is free", "PRUNE-1", [same_masks(prune(rules[::-1]), once)], n),
        holds(f"{name}: rules intersect", "PRUNE-1", [same_masks(meet, once)], n),
        holds(f"{name}: no rule keeps all", "PRUNE-1", [bool(mask.all()) for mask in everything], n),
    ]


def split_edges_stay(
    subject: Subject, plan: Plan, keys: Keys, rules: tuple[PruningRule, ...], iteration: int
) -> list[Finding]:
    """Width rules without ``drop_split_edges`` drop nothing at or above the last split (PRUNE-3, PRUNE-4)."""
    width = tuple(r for r in rules if not isinstance(r, DepthWindow) and not r.drop_split_edges)
    found = subject.implementation.prune(plan, keys, width, iteration)
    depth = plan.splits[-1] + 1 if plan.splits else plan.steps
    kept = [bool(mask.all()) for mask in found[:depth]]
    return [holds(f"{subject.name}, pruning: split edges stay", "PRUNE-3 PRUNE-4", kept, size(found))]


def backward_only(
    subject: Subject,
    trace: Trace,
    rewards: Float64[Tensor, "prompts leaves models"],
    fusion: Fusion,
    rules: tuple[PruningRule, ...],
) -> list[Finding]:
    """Pruning changes no state, log-probability, reward, value, advantage or key that exists (PRUNE-1)."""
    plan, how, weights = trace.plan, Normalization(), (1.0,) * rewards.shape[2]
    values = subject.implementation.fuse(trace, rewards, fusion)
    advantages = subject.implementation.normalize(plan, values, weights, how)
    keys = subject.implementation.leaf_keys(plan, values, weights, how)
    tensors = [*trace_tensors(trace), rewards, *values, *advantages, keys]
    before = [t.clone() for t in tensors]
    subject.implementation.prune(plan, keys, rules, 0)
    again = subject.implementation.normalize(plan, subject.implementation.fuse(trace, rewards, fusion), weights, how)
    unmoved = [torch.equal(a, b) for a, b in zip(tensors, before, strict=True)]
    repeated = [torch.equal(a, b) for a, b in zip(again, advantages, strict=True)]
    return [holds(f"{subject.name}, pruning: backward only", "PRUNE-1", [*unmoved, *repeated])]


def trace_tensors(trace: Trace) -> list[Tensor]:
    """All tensors of a trace."""
    found: list[Tensor] = []
    for field in fields(trace):
        value = getattr(trace, field.name)
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            found += [item for item in value if isinstance(item, Tensor)]
    return found
