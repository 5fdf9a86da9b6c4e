"""Fusion, normalization, pruning and subsets in NumPy, written from spec/ alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy_families import chain_subset, family_of
from numpy_plans import Data, depth_window_at, need, options_of, plan_of, real

Arrays = dict[str, np.ndarray]


def softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found: np.ndarray = weights / weights.sum(axis=-1, keepdims=True)
    return found


def fuse(a: Data, inputs: Arrays) -> Data:
    """Node values (FUSE-1 … FUSE-6): the leaves under one node are consecutive."""
    p, o, rewards = plan_of(a["plan"]), options_of("fusion", a["fusion"]), inputs["rewards"]
    prompts, leaves = len(a["prompts"]), p.roots * p.leaves
    need(rewards.shape[:2] == (prompts, leaves) and bool(np.isfinite(rewards).all()), "rewards")
    found = {}
    for depth, size in enumerate(p.sizes):
        nodes = p.roots * size
        path, chain = np.zeros((prompts, leaves)), np.ones((prompts, leaves))
        for below in range(depth + 1, p.steps + 1):
            level = inputs.get(f"log_probs.{below}", np.zeros((prompts, p.roots * p.sizes[below])))
            families = softmax(o.beta * level.reshape(prompts, -1, p.branching[below - 1])).reshape(level.shape)
            path = path + np.repeat(level, leaves // level.shape[1], axis=1)
            chain = chain * np.repeat(families, leaves // level.shape[1], axis=1)
        scores = path.reshape(prompts, nodes, -1)
        if o.kind == "standardised":
            spread = scores.std(axis=-1, keepdims=True)
            width = scores.max(axis=-1, keepdims=True) - scores.min(axis=-1, keepdims=True)
            equal = width <= 2.0**-40 * np.abs(scores).max(axis=-1, keepdims=True)
            centred = scores - scores.mean(axis=-1, keepdims=True)
            scores = np.where(equal, 0.0, centred / np.where(equal, 1.0, spread))
        weights = chain.reshape(scores.shape) if o.kind == "child_softmax" else softmax(o.beta * scores)
        below_it = rewards.reshape(prompts, nodes, -1, rewards.shape[2])
        found[f"values.{depth}"] = (weights[..., None] * below_it).sum(axis=2) if depth < p.steps else rewards
    return found


def degenerate(values: np.ndarray) -> bool:
    """NORM-4."""
    return values.size < 2 or bool(values.max() - values.min() <= 2.0**-40 * np.abs(values).max())


def z_scores(level: np.ndarray, roots: int, o: SimpleNamespace) -> np.ndarray:
    """Depth-wise scores of one reward, ``[prompts, R·n_d]`` (NORM-1 … NORM-4)."""
    trees, found = level.reshape(len(level), roots, -1), np.zeros(level.shape).reshape(len(level), roots, -1)
    for prompt, root in np.ndindex(trees.shape[:2]):
        scopes = {"tree": trees[prompt, root], "prompt": trees[prompt].ravel(), "batch": trees.ravel()}
        mean, std = scopes[o.mean_scope], scopes[o.std_scope]
        if not degenerate(mean) and not degenerate(std):
            deviation = std.std(ddof=1 if o.bessel else 0)
            found[prompt, root] = (trees[prompt, root] - mean.mean()) / (deviation + o.eps)
    return found.reshape(level.shape)


def summed(level: np.ndarray, weights: list[float], roots: int, o: SimpleNamespace) -> np.ndarray:
    """Advantages before the clip (NORM-5)."""
    w = np.array([real(x, "weights") for x in weights])
    need(len(w) == level.shape[2] and bool(np.isfinite(w).all()), "weights")
    if o.order == "sum_then_normalize":
        return z_scores(level @ w, roots, o)
    return np.stack([z_scores(level[..., m], roots, o) for m in range(len(w))], axis=-1) @ w


def normalize(a: Data, inputs: Arrays) -> Data:
    """Answer of the operation normalize (NORM-6)."""
    p, o = plan_of(a["plan"]), options_of("normalization", a["normalization"])
    levels = [summed(inputs[f"values.{d}"], a["weights"], p.roots, o) for d in range(p.steps + 1)]
    return {f"advantages.{d}": np.clip(level, -o.clip, o.clip) for d, level in enumerate(levels)}


def leaf_keys(a: Data, inputs: Arrays) -> Data:
    """Answer of the operation leaf_keys (PRUNE-2)."""
    p, o = plan_of(a["plan"]), options_of("normalization", a["normalization"])
    leaves = inputs[f"values.{p.steps}"]
    if len(a["weights"]) == leaves.shape[2] == 1:
        return {"keys": a["weights"][0] * leaves[..., 0]}
    return {"keys": summed(leaves, a["weights"], p.roots, o)}


def granular_advantages(a: Data, inputs: Arrays) -> Data:
    """Answer of the operation granular_advantages (GRAN-4, GRAN-5)."""
    f, o = family_of(a["family"]), options_of("normalization", a["normalization"])
    total = sum(summed(inputs[f"values.{g}"], a["weights"], f.roots, o) for g in f.granularities)
    return {"advantages": np.clip(total, -o.clip, o.clip)}


def staying(p: SimpleNamespace, kind: str, rule: SimpleNamespace, keys: np.ndarray) -> np.ndarray:
    """Which leaves of one tree a width rule lets stay (PRUNE-2 … PRUNE-4)."""
    order = sorted(range(len(keys)), key=lambda leaf: (-keys[leaf], leaf))
    stays = np.zeros(len(keys), dtype=bool)
    if kind == "extreme_b":
        stays[order[: rule.b] + order[-rule.b :]] = True
        return stays
    factor = p.branching[p.splits[-1]]
    for parent in range(len(keys) // factor):
        stays[next(leaf for leaf in order if leaf // factor == parent)] = True
    return stays


def prune(a: Data, inputs: Arrays) -> Data:
    """Answer of the operation prune (PRUNE-1 … PRUNE-5)."""
    p, keys = plan_of(a["plan"]), inputs["keys"]
    kept = {depth: np.ones((len(keys), p.roots * p.sizes[depth]), dtype=bool) for depth in range(1, p.steps + 1)}
    for data in a["rules"]:
        kind = data["rule"]
        rule = options_of(kind, {name: value for name, value in data.items() if name != "rule"})
        if kind == "depth_window":
            for depth in depth_window_at(rule, p.steps, a["iteration"]):
                kept[depth][:] = False
            continue
        need(bool(p.splits), "splits")
        trees = keys.reshape(-1, p.leaves)
        stays = np.stack([staying(p, kind, rule, own) for own in trees]).reshape(keys.shape)
        for depth in range(p.splits[-1] + (1 if rule.drop_split_edges else 2), p.steps + 1):
            kept[depth] &= stays
    return {f"kept.{depth}": mask for depth, mask in kept.items()}


def trained_subsets(a: Data, inputs: Arrays) -> Data:
    """Answer of the operation trained_subsets (PLAN-7)."""
    p: Any = plan_of(a["plan"])
    found = {}
    for step in p.trainable:
        rows = [
            [
                p.trained_fraction == 1 or step in chain_subset(p, a["seed"], a["iteration"], prompt, root, node)
                for root in range(p.roots)
                for node in range(p.sizes[step + 1])
            ]
            for prompt in a["prompts"]
        ]
        found[f"trained.{step + 1}"] = np.array(rows)
    return found
