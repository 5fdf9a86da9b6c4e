"""Vectors of fusion, normalization, leaf keys, pruning and chain subsets."""

from dataclasses import replace
from typing import Any

import numpy as np

from branchgrpo.conformance.codec import encode
from branchgrpo.conformance.vectors.ask import CPS, FLOW, SDE, case, rules_of
from branchgrpo.conformance.vectors.cases import Array, Case
from branchgrpo.conformance.vectors.inputs import numbers
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.options import DepthWindow, ExtremeB, Fusion, Normalization, ParentTop1, PruningRule
from branchgrpo.reference.plan import Plan

TREE = tree_plan(5, SDE, splits=(0, 2), branching=2, spread=4.0)
WIDE = tree_plan(4, FLOW, splits=(0, 1), branching=3, spread=4.0)
FLAT = tree_plan(4, SDE, splits=(0,), branching=6)
ROOTS = tree_plan(4, SDE, splits=(1,), branching=2, roots=3)
CHAINS = tree_plan(3, FLOW, roots=6)
MIX = tree_plan(6, CPS, splits=(0, 3), branching=2, sde_steps=(4,))
DEEP = tree_plan(6, SDE, splits=(0, 2, 3), branching=2)


def fused(
    slug: str, clauses: str, plan: Plan, options: Fusion, unit: float = 1 / 32, models: int = 1, **rest: Any
) -> Case:
    """Values of two prompts."""
    inputs = {
        f"log_probs.{s + 1}": numbers(f"{slug} {s}", (2, plan.roots * plan.level_sizes[s + 1]), unit)
        for s in plan.stochastic_steps
    }
    inputs["rewards"] = rest.pop("rewards", numbers(f"{slug} r", (2, plan.roots * plan.leaves, models)))
    arguments = {"plan": encode(plan), "prompts": [4, 9], "fusion": encode(options)}
    return case(
        "fuse", slug, clauses, f"{options.kind}, β = {options.beta:g}", arguments=arguments, inputs=inputs, **rest
    )


def fusions() -> list[Case]:
    """Every estimator over trees, temperatures and reward models."""
    made = []
    for kind, clause in {"path_softmax": "FUSE-2", "child_softmax": "FUSE-4", "standardised": "FUSE-5"}.items():
        name = kind.replace("_", "-")
        for where, plan in {"tree": TREE, "wide": WIDE, "mix": MIX}.items():
            made.append(fused(f"{name}-{where}", f"{clause} FUSE-1", plan, Fusion(kind, 1.0)))  # type: ignore[arg-type]
        made.append(fused(f"{name}-cold", f"{clause} FUSE-3", TREE, Fusion(kind, 2.5)))  # type: ignore[arg-type]
        made.append(fused(f"{name}-warm", f"{clause} FUSE-3", TREE, Fusion(kind, 0.1)))  # type: ignore[arg-type]
        made.append(fused(f"{name}-beta-0", "FUSE-6 FUSE-1", TREE, Fusion(kind, 0.0)))  # type: ignore[arg-type]
        made.append(fused(f"{name}-flat", "PLAN-9 FUSE-1", FLAT, Fusion(kind, 1.0)))  # type: ignore[arg-type]
        made.append(fused(f"{name}-roots", f"{clause} LOGP-6", ROOTS, Fusion(kind, 1.0), models=2))  # type: ignore[arg-type]
    made += [
        fused("chains", "FUSE-1", CHAINS, Fusion()),
        fused("large-log-probs", "FUSE-2", TREE, Fusion(), unit=8.0),
        fused("three-rewards", "FUSE-1", TREE, Fusion(), models=3),
    ]
    equal = fused("zero-spread", "FUSE-5", TREE, Fusion("standardised", 1.0))
    for name in equal.inputs:
        if name.startswith("log_probs"):
            equal.inputs[name][:] = -1.25
    near = fused("equal-to-rounding", "FUSE-5 NORM-4", TREE, Fusion("standardised", 1.0))
    for name in near.inputs:
        if name.startswith("log_probs"):
            near.inputs[name][:] = -1.25
            near.inputs[name][:, ::2] -= 2.0**-45
    made += [equal, near]
    for slug, value in {"nan": np.nan, "infinite": np.inf, "minus-infinite": -np.inf}.items():
        bad = fused(f"reward-{slug}", "ERR-4 REW-2", TREE, Fusion(), error="reward")
        bad.inputs["rewards"][1, 2, 0] = value
        made.append(bad)
    short = numbers("short", (2, TREE.leaves - 1, 1))
    made.append(fused("reward-missing", "ERR-4 REW-1", TREE, Fusion(), rewards=short, error="reward"))
    return made


def node_values(slug: str, plan: Plan, prompts: int, models: int) -> dict[str, Array]:
    """A value a node and reward model."""
    return {
        f"values.{d}": numbers(f"{slug} {d}", (prompts, plan.roots * size, models))
        for d, size in enumerate(plan.level_sizes)
    }


def scored(
    operation: str,
    slug: str,
    clauses: str,
    plan: Plan,
    options: Normalization,
    weights: tuple[float, ...] = (1.0,),
    **rest: Any,
) -> Case:
    """A case of normalization or of leaf keys."""
    prompts, models = rest.pop("prompts", 2), rest.pop("models", len(weights))
    arguments = {"plan": encode(plan), "weights": list(weights), "normalization": encode(options)}
    inputs = node_values(slug, plan, prompts, models)
    return case(operation, slug, clauses, "advantages" if operation == "normalize" else "keys of the leaves",
                arguments=arguments, inputs=inputs, **rest)  # fmt: skip


def normalizations() -> list[Case]:
    """Scopes, stds, orders, clips, and values that are equal or nearly so."""
    n, made = "normalize", []
    for mean in ("tree", "prompt"):
        for std in ("tree", "prompt", "batch"):
            options = Normalization(mean, std)
            made.append(scored(n, f"{mean}-{std}", "NORM-2 NORM-1", ROOTS, options, prompts=3))
    flow = Normalization("prompt", "batch", False, 1e-4)
    two = (3.0, 2.0)
    made += [
        scored(n, "tree", "NORM-1 NORM-3", TREE, Normalization()),
        scored(n, "wide", "NORM-1 NORM-3", WIDE, Normalization()),
        scored(n, "population", "NORM-3", TREE, Normalization(bessel=False)),
        scored(n, "flow-grpo", "NORM-2 NORM-3", CHAINS, flow, prompts=3),
        scored(n, "eps", "NORM-1", WIDE, Normalization(eps=0.5)),
        scored(n, "eps-zero", "NORM-1", WIDE, Normalization(eps=0.0)),
        scored(n, "two-rewards", "NORM-5", WIDE, Normalization(), two),
        scored(n, "negative-weight", "NORM-5", WIDE, Normalization(), (1.0, -0.5)),
        scored(n, "sum-first", "NORM-5", WIDE, Normalization(order="sum_then_normalize"), two),
        scored(n, "sum-first-scopes", "NORM-5 NORM-2", ROOTS, replace(flow, order="sum_then_normalize"), two),
        scored(n, "clipped", "NORM-6", WIDE, Normalization(clip=0.8)),
        scored(n, "clipped-sum", "NORM-6", WIDE, Normalization(clip=1.5), two),
        scored(n, "unclipped", "NORM-6", WIDE, Normalization(clip=float("inf")), (30.0, 20.0)),
        scored(n, "weight-zero", "NORM-5 REW-4", WIDE, Normalization(), (1.0, 0.0)),
    ]  # fmt: skip
    made += near_equal()
    long = scored(n, "weights-too-many", "ERR-4 NORM-5", TREE, Normalization(), (1.0, 1.0), models=1, error="weights")
    few = scored(n, "weights-too-few", "ERR-4 NORM-5", TREE, Normalization(), (1.0,), models=2, error="weights")
    return [*made, long, few]


def near_equal() -> list[Case]:
    """Values that count as equal, and values one float32 step apart that do not (NORM-4)."""
    n = "normalize"
    equal = scored(n, "equal", "NORM-4", WIDE, Normalization())
    rounding = scored(n, "equal-to-rounding", "NORM-4", WIDE, Normalization())
    distinct = scored(n, "one-float32-step", "NORM-4", WIDE, Normalization(eps=0.0), tolerance="cancelled")
    zeros = scored(n, "all-zero", "NORM-4", TREE, Normalization())
    one = scored(n, "one-of-two-equal", "NORM-4 NORM-5", WIDE, Normalization(), (1.0, 1.0))
    scoped = scored(n, "one-tree-equal", "NORM-4 NORM-2", ROOTS, Normalization("tree", "batch"))
    for name in equal.inputs:
        equal.inputs[name][:] = 0.1
        rounding.inputs[name][:] = 0.1
        rounding.inputs[name].reshape(2, -1)[:, ::2] = 0.1 + 2.0**-56
        distinct.inputs[name][:] = 1.0
        distinct.inputs[name].reshape(2, -1)[:, ::2] = 1.0 + 2.0**-23
        zeros.inputs[name][:] = 0.0
        one.inputs[name][..., 1] = -0.7
    for name in scoped.inputs:
        width = scoped.inputs[name].shape[1] // ROOTS.roots
        scoped.inputs[name][0, :width] = 0.25
    return [equal, rounding, distinct, zeros, one, scoped]


def keys() -> list[Case]:
    """Keys of the leaves: rewards, or advantages before the clip."""
    k, two = "leaf_keys", (3.0, 2.0)
    return [
        scored(k, "one-reward", "PRUNE-2", TREE, Normalization()),
        scored(k, "weighted", "PRUNE-2", TREE, Normalization(), (2.5,)),
        scored(k, "negative", "PRUNE-2", TREE, Normalization(), (-1.0,)),
        scored(k, "two-rewards", "PRUNE-2 NORM-5", WIDE, Normalization(), two),
        scored(k, "before-the-clip", "PRUNE-2 NORM-6", WIDE, Normalization(clip=0.8), two),
        scored(k, "one-reward-is-not-clipped", "PRUNE-2 NORM-6", WIDE, Normalization(clip=0.1)),
        scored(k, "sum-first", "PRUNE-2 NORM-5", WIDE, Normalization(order="sum_then_normalize"), two),
        scored(k, "opposed", "PRUNE-2 NORM-5", DEEP, Normalization(), (1.0, -0.5)),
        scored(k, "roots", "PRUNE-2 NORM-2", ROOTS, Normalization("prompt", "batch"), two),
        scored(k, "population", "PRUNE-2 NORM-3", WIDE, Normalization(bessel=False), two),
        scored(k, "three-rewards", "PRUNE-2", FLAT, Normalization(), (1.0, 0.5, 0.25)),
        scored(k, "weights-too-many", "ERR-4 NORM-5", TREE, Normalization(), (1.0,) * 3, models=2, error="weights"),
    ]  # fmt: skip


def pruned(
    slug: str,
    clauses: str,
    plan: Plan,
    rules: tuple[PruningRule, ...],
    iteration: int = 0,
    keys: Any = None,
    **rest: Any,
) -> Case:
    """Edges of two prompts that stay."""
    found = numbers(f"prune {slug}", (2, plan.roots * plan.leaves)) if keys is None else np.array(keys)
    arguments = {"plan": encode(plan), "rules": rules_of(*rules), "iteration": iteration}
    return case("prune", slug, clauses, f"iteration {iteration}", arguments=arguments, inputs={"keys": found},
                tolerance="exact", **rest)  # fmt: skip


def prunings() -> list[Case]:
    """Every rule, alone and together, with ties."""
    ties = [[0.5, 0.5, 0.2, 0.9], [0.2, 0.2, 0.2, 0.2]]
    spec = tree_plan(4, SDE, splits=(0, 1), branching=2)
    top, top_split = ParentTop1(), ParentTop1(True)
    down, up = DepthWindow(3, 2, 30, 1), DepthWindow(5, 2, 30, -1, 2)
    late = tree_plan(5, SDE, splits=(0, 3), branching=2)
    made = [
        pruned("no-rule", "PRUNE-1", DEEP, ()),
        pruned("top1-spec", "PRUNE-3 PRUNE-2", spec, (top,), keys=ties),
        pruned("top1-splits-spec", "PRUNE-3 PRUNE-2", spec, (top_split,), keys=ties),
        pruned("extreme-spec", "PRUNE-4 PRUNE-2", spec, (ExtremeB(1),), keys=ties),
        pruned("extreme-splits-spec", "PRUNE-4 PRUNE-2", spec, (ExtremeB(1, True),), keys=ties),
        pruned("top1", "PRUNE-3", DEEP, (top,)),
        pruned("top1-splits", "PRUNE-3", DEEP, (top_split,)),
        pruned("top1-three-children", "PRUNE-3", WIDE, (top,)),
        pruned("top1-roots", "PRUNE-3", ROOTS, (top,)),
        pruned("top1-flat", "PRUNE-3", FLAT, (top,)),
        pruned("top1-late", "PRUNE-3", late, (top,)),
        pruned("extreme-1", "PRUNE-4", DEEP, (ExtremeB(1),)),
        pruned("extreme-2", "PRUNE-4", DEEP, (ExtremeB(2),)),
        pruned("extreme-4-keeps-all", "PRUNE-4", DEEP, (ExtremeB(4),)),
        pruned("extreme-2-splits", "PRUNE-4", WIDE, (ExtremeB(2, True),)),
        pruned("extreme-roots", "PRUNE-4", tree_plan(4, SDE, splits=(0, 1), branching=2, roots=2), (ExtremeB(1),)),
        pruned("two-width-rules", "PRUNE-1", DEEP, (top, ExtremeB(2))),
        pruned("width-and-depth", "PRUNE-1", DEEP, (top, DepthWindow(6, 1))),
        pruned("depth-and-width", "PRUNE-1", DEEP, (DepthWindow(6, 1), top)),
        pruned("a-rule-twice", "PRUNE-1", DEEP, (top, top)),
    ]
    for t in (0, 29, 30, 60, 500):
        made.append(pruned(f"depth-down-{t}", "PRUNE-5", DEEP, (down,), t))
        made.append(pruned(f"depth-up-{t}", "PRUNE-5", DEEP, (up,), t))
    plain = tree_plan(5, SDE)
    made += [
        pruned("top1-without-a-split", "PRUNE-3 ERR-2", plain, (top,), error="split"),
        pruned("extreme-without-a-split", "PRUNE-4 ERR-2", plain, (ExtremeB(1),), error="split"),
        pruned("extreme-of-roots", "PRUNE-4 ERR-2", CHAINS, (ExtremeB(2),), error="split"),
    ]
    return made


def subsets() -> list[Case]:
    """Chains' subsets of the trainable steps."""
    flat = {f: tree_plan(20, SDE, splits=(0,), branching=4, trained_fraction=f) for f in (0.6, 0.01, 0.95)}
    chains = tree_plan(6, FLOW, roots=3, trained_fraction=0.5)
    some = tree_plan(8, SDE, splits=(0,), branching=3, trained_steps=(1, 3, 4, 6), trained_fraction=0.5)
    asked = {
        "dancegrpo": (flat[0.6], [1, 2], 7, 0),
        "next-iteration": (flat[0.6], [1, 2], 7, 1),
        "other-seed": (flat[0.6], [1, 2], 8, 0),
        "other-prompts": (flat[0.6], [1000000007, 2], 7, 0),
        "prompts-in-another-order": (flat[0.6], [2, 1], 7, 0),
        "least": (flat[0.01], [1], 7, 0),
        "nearly-all": (flat[0.95], [1], 7, 3),
        "roots": (chains, [5, 6], 3, 2),
        "named-steps": (some, [5, 6], 3, 2),
        "all": (FLAT, [5, 6], 3, 2),
        "tree": (TREE, [5, 6], 3, 2),
        "late-iteration": (some, [5], 3, 100000),
    }
    return [
        case("trained_subsets", slug, "PLAN-7 NOISE-4", f"f = {plan.trained_fraction:g}, iteration {t}",
             arguments={"plan": encode(plan), "prompts": ids, "seed": seed, "iteration": t}, tolerance="exact")
        for slug, (plan, ids, seed, t) in asked.items()
    ]  # fmt: skip


def tail() -> list[Case]:
    """All of them."""
    return [*fusions(), *normalizations(), *keys(), *prunings(), *subsets()]
