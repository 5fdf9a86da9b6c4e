"""Plan families and costs in NumPy, written from spec/ alone."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from numpy_plans import (
    Data,
    check_sigmas,
    depth_window_at,
    generator_of,
    kernel_of,
    need,
    options_of,
    plan_of,
    real,
    whole,
)


def continuation(start: int, steps: int, granularity: int, anchor: str) -> list[int]:
    """GRAN-1, GRAN-2."""
    whole(granularity, 1, "granularity")
    whole(start, 1, "start", steps)
    if start == steps:
        return [steps]
    if anchor == "start":
        return [start, *range(start + 1, steps, granularity), steps]
    return [start, *(i for i in range(start + 1, steps + 1) if (steps - i) % granularity == 0)]


def granular_indices(a: Data) -> Data:
    """Answer of the operation granular_indices."""
    return {"indices": continuation(a["start"], a["steps"], a["granularity"], a["anchor"])}


def member(f: SimpleNamespace, k: int, granularity: int) -> tuple[list[int], Data]:
    """Indices of the continuation, and the member's plan (SING-1)."""
    indices = continuation(k + 1, f.steps, granularity, f.stride_anchor)
    sigmas = [*f.sigmas[: k + 1], *(f.sigmas[i] for i in indices)]
    steps = range(len(sigmas) - 1)
    return indices, {
        "sigmas": sigmas,
        "kernels": [f.kernel if i == k else {"kind": "ode", "eta": 0.0} for i in steps],
        "branching": [f.group if i == k else 1 for i in steps],
        "spreads": ["inf" for _ in steps],
        "roots": f.roots,
        "output": f.output,
        "trained_steps": None,
        "trained_fraction": 1.0,
    }


def family_of(data: Data) -> SimpleNamespace:
    """A family (SING-5)."""
    f = SimpleNamespace(**data)
    f.sigmas = [real(s, f"sigmas[{i}]") for i, s in enumerate(f.sigmas)]
    check_sigmas(f.sigmas)
    f.steps, f.kernel = len(f.sigmas) - 1, kernel_of(f.kernel)
    top = f.steps - (2 if f.output == "denoised" else 1)
    need(bool(f.ks), "ks")
    for i, k in enumerate(f.ks):
        whole(k, 0, f"ks[{i}]", top)
        need(k not in f.ks[:i] and f.ks == sorted(f.ks), f"ks[{i}]")
    whole(f.group, 2, "group")
    need(bool(f.granularities) and len(set(f.granularities)) == len(f.granularities), "granularities")
    need(f.stride_anchor in ("start", "end"), "stride_anchor")
    f.members = {(k, g): member(f, k, g) for k in f.ks for g in f.granularities}
    for _, own in f.members.values():
        plan_of(own)
    return f


def family(a: Data) -> Data:
    """Answer of the operation family."""
    found = family_of(a["family"]).members
    members = [{"k": k, "granularity": g, "indices": i, "plan": p} for (k, g), (i, p) in found.items()]
    return {"members": members}


def distinct_calls(f: SimpleNamespace, k: int) -> int:
    """Distinct non-empty proper prefixes of the index lists (GRAN-3)."""
    lists = [f.members[k, g][0] for g in f.granularities]
    return len({tuple(indices[:n]) for indices in lists for n in range(1, len(indices))})


def family_counts(f: SimpleNamespace) -> Data:
    """What a prompt of a family costs (SING-4, GRAN-3)."""
    children = f.roots * f.group
    anchor, continued = f.roots * (max(f.ks) + 1), children * sum(distinct_calls(f, k) for k in f.ks)
    leaves = children * len(f.ks) * len(f.granularities)
    calls, nodes = anchor + continued, anchor + continued + leaves
    public = f.steps + sum(f.group * (1 + sum(1 + max(0, f.steps - k - 2) // g for g in f.granularities)) for k in f.ks)
    return {
        "steps": f.steps, "leaves": leaves, "nodes": nodes, "edges": nodes - f.roots, "denoiser_calls": calls,
        "kept_edges": nodes - f.roots, "kept_parents": calls, "trained_edges": children * len(f.ks),
        "trained_parents": f.roots * len(f.ks), "calls_public": f.roots * public,
        "calls_shared": f.roots * f.steps + continued, "calls_shared_stopped_anchor": calls,
    }  # fmt: skip


def chain_subset(p: SimpleNamespace, seed: int, iteration: int, prompt: int, root: int, leaf: int) -> set[int]:
    """Trained steps of one chain (PLAN-7)."""
    if p.trained_fraction == 1:
        return set(p.trainable)
    size = max(1, int(p.trained_fraction * len(p.trainable)))
    generator = generator_of(seed, iteration, "subset", prompt, root, p.steps, leaf)
    return set(generator.choice(p.trainable, size=size, replace=False).tolist())


def kept_by_depth(p: SimpleNamespace, rules: list[tuple[str, Any]], iteration: int) -> list[tuple[int, int]]:
    """Kept edges of one tree and their parents for child depth 1 … T (PLAN-5)."""
    width = [(kind, rule) for kind, rule in rules if kind != "depth_window"]
    windows = [depth_window_at(rule, p.steps, iteration) for kind, rule in rules if kind == "depth_window"]
    need(len(width) <= 1, "pruning")
    stay, drop, last = p.leaves, False, p.splits[-1] if p.splits else p.steps
    need(not width or (bool(p.splits) and p.trained_fraction == 1), "pruning")
    for kind, rule in width:
        stay = p.sizes[last] if kind == "parent_top1" else min(2 * rule.b, p.leaves)
        drop = rule.drop_split_edges
        need(not (kind == "extreme_b" and drop and stay < p.leaves), "pruning")
    found = []
    for depth, (parents, nodes) in enumerate(pairwise(p.sizes), start=1):
        below = depth > last + (0 if drop else 1)
        hidden = any(depth in window for window in windows)
        found.append((0, 0) if hidden else (min(stay, nodes), min(stay, parents)) if below else (nodes, parents))
    return found


def counts(a: Data) -> Data:
    """Answer of the operation counts."""
    if "family" in a:
        return family_counts(family_of(a["family"]))
    p = plan_of(a["plan"])
    rules = [(r["rule"], options_of(r["rule"], {n: v for n, v in r.items() if n != "rule"})) for r in a["rules"]]
    kept = kept_by_depth(p, rules, a["iteration"])
    trained = [pair for step, pair in enumerate(kept) if step in p.trainable]
    if p.trained_fraction < 1:
        subsets = [chain_subset(p, 0, a["iteration"], 0, 0, leaf) for leaf in range(p.leaves)]
        chains = [(i, leaf) for leaf, steps in enumerate(subsets) for i in steps if kept[i][0]]
        trained = [(len(chains), len({(i, leaf * p.sizes[i] // p.leaves) for i, leaf in chains}))]
    numbers = {
        "leaves": p.leaves, "nodes": sum(p.sizes), "edges": sum(p.sizes[1:]), "denoiser_calls": sum(p.sizes[:-1]),
        "kept_edges": sum(n for n, _ in kept), "kept_parents": sum(n for _, n in kept),
        "trained_edges": sum(n for n, _ in trained), "trained_parents": sum(n for _, n in trained),
    }  # fmt: skip
    return {"steps": p.steps, **{name: p.roots * n for name, n in numbers.items()}}
