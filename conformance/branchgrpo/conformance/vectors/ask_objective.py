"""Vectors of the objective: stored traces, a linear model, J and its gradient."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from branchgrpo.conformance.adapters.reference import ReferenceImplementation
from branchgrpo.conformance.codec import encode
from branchgrpo.conformance.vectors.ask import CPS, FLOW, SDE, case
from branchgrpo.conformance.vectors.ask_families import SMALL
from branchgrpo.conformance.vectors.ask_rollouts import GUIDED, linear, rolled, tolerance_of
from branchgrpo.conformance.vectors.cases import Array, Case
from branchgrpo.conformance.vectors.inputs import numbers, signs
from branchgrpo.conformance.vectors.operations import DRIVERS
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.options import Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import LeafOutput

TREE = tree_plan(4, SDE, splits=(0, 2), branching=2, spread=1.0)
FLOWED = tree_plan(4, FLOW, splits=(0, 1), branching=2, spread=4.0)
OPEN = Objective(clip_low=0.999, clip_high=1e6)
CLIPPED = Objective(clip_low=0.1, clip_high=0.2)
GRID = 2.0**16
"""Stored numbers are rounded to 1/GRID, so that they are the same wherever they are made."""


def rounded(name: str, array: Array, storage: str) -> Array:
    """A stored array on the grid; stds and bf16 states stay what they are."""
    if name.startswith("stds") or (name.startswith("states") and storage == "bfloat16"):
        return array
    return np.round(array * GRID) / GRID


def stored(slug: str, plan: Plan, index: int, latent: tuple[int, ...], **rest: Any) -> dict[str, Array]:
    """What a rollout of the reference under the old weights left behind."""
    asked = rolled(f"{slug} {index}", "ROLL-1", plan, latent, **rest)
    asked = replace(asked, inputs={**asked.inputs, **linear(slug, "model", latent)})
    answer = DRIVERS["rollout"](ReferenceImplementation(), asked)
    found = {}
    for name, array in answer.items():
        if isinstance(array, np.ndarray):
            part, _, depth = name.partition(".")
            key = f"{part}.{index}.{depth}" if depth else f"{part}.{index}"
            found[key] = rounded(name, array, asked.arguments["storage"])
    return found


def edges(slug: str, plan: Plan, index: int, prompts: int, share: float) -> dict[str, Array]:
    """Advantages of all nodes, and masks that leave every tree its first trainable depth."""
    found: dict[str, Array] = {}
    first = min(plan.trainable_steps) + 1
    for depth, size in enumerate(plan.level_sizes):
        shape = (prompts, plan.roots * size)
        found[f"advantages.{index}.{depth}"] = numbers(f"{slug} A {index} {depth}", shape, 1 / 64)
        if depth:
            mask = signs(f"{slug} kept {index} {depth}", shape, share)
            found[f"kept.{index}.{depth}"] = np.ones(shape, dtype=bool) if depth == first else mask
    return found


def updated(
    slug: str,
    clauses: str,
    plans: Plan | Sequence[Plan],
    options: Objective = CLIPPED,
    *,
    latent: tuple[int, ...] = (3,),
    ids: tuple[int, ...] = (3, 8),
    share: float = 1.0,
    moved: float = 1 / 2048,
    frozen: bool = False,
    error: str | None = None,
    **rest: Any,
) -> Case:
    """One update: old weights made the traces, weights that moved a little are judged."""
    plans = [plans] if isinstance(plans, Plan) else list(plans)
    inputs = {**linear(slug, "model", latent, moved), "labels": numbers(f"{slug} labels", (len(ids),), 1 / 64)}
    if frozen:
        inputs |= linear(f"{slug} frozen", "frozen", latent)
    for index, plan in enumerate(plans):
        inputs |= stored(slug, plan, index, latent, ids=ids, **rest)
        inputs |= edges(slug, plan, index, len(ids), share)
    asked = rolled(slug, "ROLL-1", plans[0], latent, ids, **rest).arguments
    kept = {name: asked[name] for name in ("prompts", "dtype", "storage", "reduction", "guidance")}
    arguments = {"plans": [encode(p) for p in plans], "objective": encode(options), "frozen": frozen, **kept}
    return case("objective", slug, clauses, f"{len(plans)} plan(s), {len(ids)} prompt(s)", inputs=inputs,
                arguments=arguments, tolerance=tolerance_of(asked), error=error)  # fmt: skip


def objectives() -> list[Case]:
    """Clips, reductions, weights, KL, masks, outputs, guidance, dtypes and families."""
    depth, std = replace(CLIPPED, reduction="depth_mean"), replace(CLIPPED, edge_weights="std")
    kl = replace(CLIPPED, kl=0.3)
    ks = [SMALL.member(k, 1) for k in SMALL.ks]
    some = tree_plan(5, SDE, splits=(0,), branching=3, trained_steps=(1, 3))
    roots = tree_plan(3, FLOW, roots=3)
    sample = replace(TREE, output=LeafOutput.SAMPLE)
    made = [
        updated("on-policy", "OBJ-1 OBJ-7", TREE, moved=0.0),
        updated("clipped", "OBJ-2 OBJ-7", TREE),
        updated("low-and-high", "OBJ-2", TREE, Objective(clip_low=0.3, clip_high=0.05)),
        updated("high-and-low", "OBJ-2", TREE, Objective(clip_low=0.02, clip_high=0.5)),
        updated("open", "OBJ-1 OBJ-2", TREE, OPEN),
        updated("tight", "OBJ-2", TREE, Objective(clip_low=1e-4, clip_high=1e-4)),
        updated("sum", "LOGP-2 OBJ-1", TREE, reduction="sum"),
        updated("depth-mean", "OBJ-4", TREE, depth),
        updated("depth-mean-pruned", "OBJ-4 PRUNE-6", TREE, depth, share=0.5),
        updated("pruned", "PRUNE-6 OBJ-3", TREE, share=0.5),
        updated("trees-of-different-size", "OBJ-7 PRUNE-6", FLOWED, share=0.4, ids=(3, 8, 5)),
        updated("weighted", "OBJ-6", FLOWED, std),
        updated("weighted-pruned", "OBJ-6 PRUNE-6", FLOWED, std, share=0.5),
        updated("weighted-depth-mean", "OBJ-6 OBJ-4", FLOWED, replace(std, reduction="depth_mean")),
        updated("weighted-families", "OBJ-6 SING-6", ks, std),
        updated("kl", "OBJ-5", TREE, kl, frozen=True),
        updated("kl-sum", "OBJ-5 LOGP-2", TREE, kl, frozen=True, reduction="sum"),
        updated("kl-depth-mean", "OBJ-5 OBJ-4", TREE, replace(kl, reduction="depth_mean"), frozen=True),
        updated("kl-weighted", "OBJ-5 OBJ-6", FLOWED, replace(kl, edge_weights="std"), frozen=True),
        updated("kl-guided", "OBJ-5 ROLL-4", TREE, kl, frozen=True, guidance=GUIDED),
        updated("guided", "ROLL-4 OBJ-1", TREE, guidance=GUIDED),
        updated("families", "SING-6 OBJ-7", ks),
        updated("one-k", "SING-6", [ks[1]]),
        updated("roots", "OBJ-7 PLAN-1", roots, share=0.6),
        updated("trained-steps", "PLAN-6 OBJ-3", some),
        updated("sample", "PLAN-6 OBJ-3", sample),
        updated("cps", "KERN-4 OBJ-1", tree_plan(4, CPS, splits=(1,), branching=2)),
        updated("ode-prefix", "OBJ-3 LOGP-4", tree_plan(5, FLOW, splits=(2,), branching=3, sde_steps=())),
        updated("image", "LOGP-2 OBJ-1", TREE, latent=(2, 2)),
        updated("one-edge", "OBJ-3", tree_plan(2, SDE), ids=(5,)),
        updated("bfloat16", "LOGP-3 OBJ-1", TREE, storage="bfloat16"),
        updated("float32", "KERN-6 OBJ-1", TREE, OPEN, dtype="float32", storage="float32"),
    ]
    zero = updated("advantages-of-zero", "OBJ-3", TREE)
    for name in zero.inputs:
        if name.startswith("advantages"):
            zero.inputs[name].reshape(2, -1)[:, ::2] = 0.0
    return [*made, zero, *refusals()]


def refusals() -> list[Case]:
    """Updates that are refused."""
    kl = replace(CLIPPED, kl=0.3)
    short = updated("conditions-too-few", "OBJ-8", TREE, error="condition")
    long = updated("conditions-too-many", "OBJ-8", TREE, error="condition")
    nothing = updated("nothing-kept", "OBJ-3 ERR-2", TREE, error="trained edges")
    last = updated("only-the-last-step-kept", "OBJ-3 PLAN-6", TREE, error="trained edges")
    tree = updated("one-tree-empty", "OBJ-3 ERR-2", TREE, error="trained edges")
    for depth in range(1, TREE.steps + 1):
        nothing.inputs[f"kept.0.{depth}"][:] = False
        last.inputs[f"kept.0.{depth}"][:] = depth == TREE.steps
        tree.inputs[f"kept.0.{depth}"][1] = False
    broken = updated("velocity-nan", "ERR-3", TREE, error="velocity")
    broken.inputs["model.sigma"][0] = np.nan
    return [
        replace(short, inputs={**short.inputs, "labels": numbers("short", (1,), 1 / 64)}),
        replace(long, inputs={**long.inputs, "labels": numbers("long", (3,), 1 / 64)}),
        updated("kl-without-a-frozen-policy", "ERR-5 OBJ-5", TREE, kl, error="reference_model"),
        updated("frozen-policy-without-kl", "ERR-5 OBJ-5", TREE, frozen=True, error="reference_model"),
        nothing, last, tree, broken,
    ]  # fmt: skip
