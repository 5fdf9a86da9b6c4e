"""Vectors of plan families, continuations, costs and multi-granularity advantages."""

from dataclasses import replace
from typing import Any

from branchgrpo.conformance.codec import encode
from branchgrpo.conformance.vectors.ask import FLOW, SDE, case, rules_of
from branchgrpo.conformance.vectors.cases import Case
from branchgrpo.conformance.vectors.inputs import numbers
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.options import DepthWindow, ExtremeB, Normalization, ParentTop1, PruningRule
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput

SMALL = PlanFamily(shifted_schedule(6), FLOW, (0, 1, 3), 3, (1, 2, 3))


def continuations() -> list[Case]:
    """Indices of granular continuations."""
    good = [
        (2, 16, 2), (1, 16, 3), (2, 16, 3), (4, 4, 2), (3, 4, 5), (1, 5, 1), (8, 16, 4), (9, 16, 16), (1, 1, 1),
    ]  # fmt: skip
    made = [
        case("granular_indices", f"{start}-{steps}-{g}-{anchor}", "GRAN-1" if anchor == "start" else "GRAN-2",
             f"k + 1 = {start}, T = {steps}, λ = {g}, anchored at the {anchor}", tolerance="exact",
             arguments={"start": start, "steps": steps, "granularity": g, "anchor": anchor})
        for start, steps, g in good for anchor in ("start", "end")
    ]  # fmt: skip
    bad = {
        "lambda-0": (2, 16, 0, "granularity"),
        "lambda-negative": (2, 16, -1, "granularity"),
        "lambda-half": (2, 16, 1.5, "granularity"),
        "start-0": (0, 16, 2, "start"),
        "start-beyond-the-end": (17, 16, 2, "start"),
    }
    for slug, (start, steps, g, field) in bad.items():
        arguments = {"start": start, "steps": steps, "granularity": g, "anchor": "start"}
        made.append(case("granular_indices", slug, "GRAN-2 ERR-2", "refused", arguments=arguments, error=field))
    return made


def good_families() -> dict[str, PlanFamily]:
    """Families that are allowed."""
    return {
        "small": SMALL,
        "single": replace(SMALL, granularities=(1,)),
        "end": replace(SMALL, granularities=(1, 3), stride_anchor="end"),
        "descending": replace(SMALL, granularities=(3, 1)),
        "sample": PlanFamily(shifted_schedule(4), FLOW, (0, 3), 2, roots=2, output=LeafOutput.SAMPLE),
        "constant": PlanFamily(shifted_schedule(5), SDE, (2,), 4, (2,)),
        "spec": PlanFamily(shifted_schedule(4), FLOW, (0, 1), 3, (1, 2)),
    }


def families() -> list[Case]:
    """Families that are allowed, and families that are not."""
    made = [
        case("family", slug, "SING-1 GRAN-1", "its members", arguments={"family": encode(f)}, tolerance="exact")
        for slug, f in good_families().items()
    ]
    bad: dict[str, tuple[dict[str, Any], str]] = {
        "no-k": ({"ks": []}, "ks"),
        "k-last-under-denoised": ({"ks": [0, 5]}, "ks[1]"),
        "k-negative": ({"ks": [-1, 2]}, "ks[0]"),
        "k-twice": ({"ks": [1, 1]}, "ks[1]"),
        "k-descending": ({"ks": [3, 1]}, "ks[0]"),
        "group-of-one": ({"group": 1}, "group"),
        "no-lambda": ({"granularities": []}, "granularities"),
        "lambda-twice": ({"granularities": [1, 2, 1]}, "granularities"),
        "lambda-0": ({"granularities": [0]}, "granularity"),
        "anchor": ({"stride_anchor": "middle"}, "stride_anchor"),
        "kernel-ode": ({"kernel": {"kind": "ode", "eta": 0.0}}, "branching[0]"),
        "stops-above-0": ({"sigmas": [*SMALL.sigmas[:-1], 0.1]}, "sigmas[6]"),
        "no-root": ({"roots": 0}, "roots"),
    }
    for slug, (change, field) in bad.items():
        arguments = {"family": {**encode(SMALL), **change}}
        made.append(case("family", slug, "SING-5 ERR-2", "refused", arguments=arguments, error=field))
    return made


def costs() -> list[Case]:
    """What plans and families cost."""
    dense = tree_plan(20, SDE, splits=(0, 3, 6, 9), branching=2, spread=4.0)
    good: dict[str, tuple[Plan, tuple[PruningRule, ...], int, str]] = {
        "dense": (dense, (), 0, "PLAN-4"),
        "top1": (dense, (ParentTop1(),), 0, "PLAN-5"),
        "top1-splits": (dense, (ParentTop1(True),), 0, "PLAN-5"),
        "extreme-4": (dense, (ExtremeB(4),), 0, "PLAN-5"),
        "extreme-all": (dense, (ExtremeB(8, True),), 0, "PLAN-5"),
        "depth-0": (dense, (DepthWindow(10),), 0, "PLAN-5"),
        "depth-60": (dense, (DepthWindow(10),), 60, "PLAN-5"),
        "both": (dense, (ParentTop1(), DepthWindow(12, 3)), 30, "PLAN-5"),
        "flat": (tree_plan(20, SDE, splits=(0,), branching=12), (), 0, "PLAN-4"),
        "roots": (tree_plan(10, FLOW, roots=24, output=LeafOutput.SAMPLE), (), 0, "PLAN-4"),
        "trained": (tree_plan(6, SDE, splits=(0,), branching=2, trained_steps=(1, 3)), (), 0, "PLAN-5"),
        "mixed": (tree_plan(8, SDE, splits=(0, 3), branching=2, sde_steps=(5, 6)), (), 0, "PLAN-5"),
        "fraction": (tree_plan(6, SDE, splits=(0,), branching=4, trained_fraction=0.5), (), 2, "PLAN-7"),
    }
    made = [
        case("counts", slug, clause, "a plan and its rules", tolerance="exact",
             arguments={"plan": encode(p), "rules": rules_of(*rules), "iteration": t})
        for slug, (p, rules, t, clause) in good.items()
    ]  # fmt: skip
    published = PlanFamily(shifted_schedule(16), FLOW, tuple(range(8)), 12)
    some = tree_plan(6, SDE, splits=(0,), branching=4, trained_fraction=0.5)
    made.append(
        case("counts", "fraction-and-depth", "PLAN-5 PLAN-7", "subsets beside a depth window", tolerance="exact",
             arguments={"plan": encode(some), "rules": rules_of(DepthWindow(2, 2)), "iteration": 2})
    )  # fmt: skip
    for granularities in ((1,), (1, 2), (1, 2, 3)):
        f = replace(published, granularities=granularities)
        made.append(case("counts", f"g2rpo-{len(granularities)}", "SING-4 GRAN-3", "G²RPO as published",
                         arguments={"family": encode(f)}, tolerance="exact"))  # fmt: skip
    for slug, f in good_families().items():
        made.append(case("counts", f"family-{slug}", "SING-4 GRAN-3", "a plan family",
                         arguments={"family": encode(f)}, tolerance="exact"))  # fmt: skip
    bad_rules: dict[str, tuple[Plan, tuple[PruningRule, ...], str]] = {
        "two-width-rules": (dense, (ParentTop1(), ExtremeB(2)), "pruning"),
        "extreme-splits": (dense, (ExtremeB(2, True),), "pruning"),
        "window-beyond-the-end": (dense, (DepthWindow(21),), "depth_window.start"),
        "width-without-a-split": (tree_plan(4, SDE), (ParentTop1(),), "pruning"),
        "width-beside-a-fraction": (some, (ExtremeB(1),), "pruning"),
    }
    for slug, (p, rules, field) in bad_rules.items():
        arguments = {"plan": encode(p), "rules": rules_of(*rules), "iteration": 0}
        made.append(case("counts", slug, "PLAN-5 ERR-2", "refused", arguments=arguments, error=field))
    return made


def granular(
    slug: str,
    clauses: str,
    family: PlanFamily,
    k: int,
    options: Normalization,
    weights: tuple[float, ...] = (1.0,),
    **rest: Any,
) -> Case:
    """Advantages of the children of step k."""
    shape = (rest.pop("prompts", 2), family.roots * family.group, rest.pop("models", len(weights)))
    arguments = {"family": encode(family), "k": k, "weights": list(weights), "normalization": encode(options)}
    inputs = {f"values.{g}": numbers(f"{slug}.{g}", shape) for g in family.granularities}
    return case(
        "granular_advantages", slug, clauses, "children of one step", arguments=arguments, inputs=inputs, **rest
    )


def granular_cases() -> list[Case]:
    """Multi-granularity advantages."""
    default, two = Normalization(), (1.0, -0.5)
    pooled = PlanFamily(shifted_schedule(4), FLOW, (0, 3), 2, (1, 2), roots=2, output=LeafOutput.SAMPLE)
    scoped = Normalization(mean_scope="prompt", std_scope="prompt")
    one = PlanFamily(shifted_schedule(5), Kernel(KernelKind.CPS, 0.5), (1,), 6)
    made = [
        granular("three", "GRAN-4", SMALL, 0, default),
        granular("three-late", "GRAN-4", SMALL, 3, default),
        granular("one-lambda", "GRAN-6", one, 1, default),
        granular("two-rewards", "GRAN-4 NORM-5", SMALL, 1, default, two),
        granular("sum-first", "GRAN-4 NORM-5", SMALL, 1, Normalization(order="sum_then_normalize"), two),
        granular("clipped", "GRAN-5", SMALL, 0, Normalization(clip=1.2), (1.0,)),
        granular("clipped-two-rewards", "GRAN-5 NORM-6", SMALL, 1, Normalization(clip=0.9), (1.0, 0.8)),
        granular("unclipped", "GRAN-5", SMALL, 1, Normalization(clip=float("inf")), (3.0, 2.0)),
        granular("population", "GRAN-4 NORM-3", SMALL, 3, Normalization(bessel=False)),
        granular("roots", "GRAN-4 NORM-2", pooled, 0, default),
        granular("pooled", "GRAN-4 NORM-2", pooled, 0, scoped),
        granular("pooled-at-the-end", "GRAN-4 NORM-2", pooled, 3, scoped),
        granular("batch", "GRAN-4 NORM-2", pooled, 0, Normalization("prompt", "batch", False, 1e-4)),
        granular("descending", "GRAN-4", replace(SMALL, granularities=(3, 1)), 0, default),
    ]
    equal = granular("one-lambda-equal", "GRAN-4 NORM-4", SMALL, 0, default)
    equal.inputs["values.2"][:] = 0.3
    long = granular("weights-too-many", "ERR-4", SMALL, 0, default, (1.0, 1.0, 1.0), models=2, error="weights")
    return [*made, equal, long]


def family_parts() -> list[Case]:
    """All of them."""
    return [*continuations(), *families(), *costs(), *granular_cases()]
