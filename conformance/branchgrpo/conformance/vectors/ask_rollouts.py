"""Vectors of rollouts: a linear model and all draws in the file."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from branchgrpo.conformance.codec import encode
from branchgrpo.conformance.vectors.ask import CPS, FLOW, SDE, case
from branchgrpo.conformance.vectors.ask_families import SMALL
from branchgrpo.conformance.vectors.cases import Array, Case
from branchgrpo.conformance.vectors.inputs import numbers
from branchgrpo.conformance.vectors.model import WEIGHTS, draw_shapes, elements
from branchgrpo.reference.counts import count_family, count_plan
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput
from branchgrpo.reference.windows import WindowedPlan, WindowSchedule

TREE = tree_plan(5, SDE, splits=(0, 2), branching=2, spread=1.0)
NONE, GUIDED = {"kind": "none", "scale": 1.0}, {"kind": "classifier_free", "scale": 3.5}


def linear(name: str, prefix: str, latent: Sequence[int], change: float = 0.0) -> dict[str, Array]:
    """Weights of a linear model: A within ±3/8, b, c and d within ±3/4; ``change`` moves them a little."""
    d = elements(latent)
    shapes = {"weight": (d, d), "sigma": (d,), "bias": (d,), "label": (d,)}
    found = {}
    for part in WEIGHTS:
        unit = 1 / 256 if part == "weight" else 1 / 128
        moved = change * numbers(f"{name} {part} moved", shapes[part], 1.0)
        found[f"{prefix}.{part}"] = numbers(f"{name} {part}", shapes[part], unit) + moved
    return found


def draws(name: str, plans: Sequence[Plan], prompts: int, latent: Sequence[int]) -> dict[str, Array]:
    """All draws that rollouts of some plans may ask for, as ``noise.ROLE.DEPTH``."""
    shapes = {key: shape for plan in plans for key, shape in draw_shapes(plan, prompts, latent).items()}
    return {
        f"noise.{role}.{depth}": numbers(f"{name} {role} {depth}", shape)
        for (role, depth), shape in sorted(shapes.items())
    }


def settings(latent: Sequence[int], ids: Sequence[int], **change: Any) -> dict[str, Any]:
    """What a rollout is asked for beside its plan."""
    plain = {
        "prompts": list(ids),
        "latent": list(latent),
        "dtype": "float64",
        "storage": "float64",
        "reduction": "mean",
        "iteration": 0,
        "guidance": NONE,
    }
    return {**plain, **change}


def tolerance_of(arguments: dict[str, Any]) -> str:
    """Bound by the dtype of the arithmetic."""
    return "composed" if arguments["dtype"] == "float64" else "float32_composed"


def rolled(
    slug: str, clauses: str, plan: Plan, latent: tuple[int, ...] = (3,), ids: tuple[int, ...] = (3, 8), **rest: Any
) -> Case:
    """Trees of some prompts."""
    error = rest.pop("error", None)
    asked = settings(latent, ids, **rest)
    inputs = {
        **draws(slug, [plan], len(ids), latent),
        **linear(slug, "model", latent),
        "labels": numbers(f"{slug} labels", (len(ids),), 1 / 64),
    }
    calls = len(ids) * count_plan(plan).denoiser_calls
    return case("rollout", slug, clauses, f"{plan.roots * plan.leaves} leaves a prompt", inputs=inputs,
                arguments={"plan": encode(plan), **asked}, tolerance=tolerance_of(asked), error=error,
                expected={"calls": {"least": calls, "most": calls}})  # fmt: skip


def rollouts() -> list[Case]:
    """Trees over kernels, spreads, roots, outputs, dtypes and windows."""
    mix = WindowedPlan(
        tree_plan(8, SDE, splits=(0, 3), branching=2, spread=2.0), WindowSchedule(2, last=6, stride=2, period=5)
    )
    group = WindowedPlan(tree_plan(8, FLOW), WindowSchedule(3, last=6, stride=3, period=5), 3)
    end = LeafOutput.SAMPLE
    roots = tree_plan(4, SDE, splits=(1, 2), branching=2, spread=1.0, roots=2)
    made = [
        rolled("tree", "ROLL-1 NOISE-3", TREE),
        rolled("tree-sum", "LOGP-2 ROLL-1", TREE, reduction="sum"),
        rolled("tree-sample", "ROLL-6 PLAN-6", replace(TREE, output=end)),
        rolled("flow", "KERN-3 ROLL-1", tree_plan(4, FLOW, splits=(0, 1), branching=2, spread=4.0)),
        rolled("cps", "KERN-4 ROLL-1", tree_plan(4, CPS, splits=(1,), branching=3, spread=0.5)),
        rolled("cps-sample", "KERN-5 ROLL-6", tree_plan(4, CPS, splits=(1,), branching=2, output=end)),
        rolled("flow-sample", "KERN-3 ROLL-6", tree_plan(3, FLOW, splits=(2,), branching=3, spread=2.0, output=end)),
        rolled("ode-prefix", "KERN-2 PLAN-1", tree_plan(5, FLOW, splits=(2,), branching=3, sde_steps=())),
        rolled("equal-siblings", "NOISE-2", tree_plan(3, SDE, splits=(0,), branching=3, spread=0.0)),
        rolled("independent-siblings", "NOISE-2", tree_plan(3, SDE, splits=(0, 1), branching=2)),
        rolled("roots", "ROLL-1 NOISE-3", tree_plan(4, FLOW, roots=3)),
        rolled("roots-with-splits", "NOISE-1 NOISE-3", roots),
        rolled("flat", "PLAN-9 ROLL-1", tree_plan(4, SDE, splits=(0,), branching=4)),
        rolled("one-step", "PLAN-6 ROLL-6", tree_plan(1, SDE)),
        rolled("one-step-sample", "PLAN-6 ROLL-6", tree_plan(1, SDE, splits=(0,), branching=2, output=end)),
        rolled("image", "ROLL-1 LOGP-2", TREE, (2, 2)),
        rolled("prompt-order", "NOISE-4 ROLL-2", TREE, ids=(8, 3, 1000000007)),
        rolled("one-prompt", "ROLL-2", TREE, ids=(5,)),
        rolled("iteration", "NOISE-4 ROLL-2", TREE, iteration=41),
        rolled("guided", "ROLL-4", TREE, guidance=GUIDED),
        rolled("bfloat16", "ROLL-5 LOGP-3", TREE, storage="bfloat16"),
        rolled("bfloat16-sum", "LOGP-3 ROLL-5", TREE, (2, 3), storage="bfloat16", reduction="sum"),
        rolled("float32-storage", "ROLL-5 LOGP-3", TREE, storage="float32"),
        rolled("float32", "KERN-6 ROLL-5", TREE, dtype="float32", storage="float32"),
    ]  # fmt: skip
    made += [rolled(f"mix-{t}", "WIN-1 ROLL-1", mix.at(t)) for t in (0, 10, 15, 40)]
    made += [rolled(f"window-{t}", "WIN-3 ROLL-1", group.at(t)) for t in (0, 5, 40)]
    return made + refusals()


def refusals() -> list[Case]:
    """Models that give no velocity, and conditions that do not fit."""
    made = []
    for slug, value in {"nan": np.nan, "infinite": np.inf}.items():
        bad = rolled(f"velocity-{slug}", "ERR-3", TREE, error="velocity")
        bad.inputs["model.bias"][1] = value
        made.append(bad)
    for slug, count in {"too-few": 1, "none": 0, "too-many": 3}.items():
        bad = rolled(f"conditions-{slug}", "ERR-3 ROLL-3", TREE, error="condition")
        made.append(replace(bad, inputs={**bad.inputs, "labels": numbers(slug, (count,), 1 / 64)}))
    return made


def grown(
    slug: str,
    clauses: str,
    family: PlanFamily,
    latent: tuple[int, ...] = (2,),
    ids: tuple[int, ...] = (3, 8),
    **rest: Any,
) -> Case:
    """Every member of a family."""
    asked = settings(latent, ids, **rest)
    members = [family.member(*member) for member in family.members()]
    inputs = {
        **draws(f"family {slug}", members, len(ids), latent),
        **linear(f"family {slug}", "model", latent),
        "labels": numbers(f"family {slug} labels", (len(ids),), 1 / 64),
    }
    least = len(ids) * count_family(family).denoiser_calls
    most = len(ids) * sum(count_plan(member).denoiser_calls for member in members)
    return case("singular_rollout", slug, clauses, "all members of a family", inputs=inputs,
                arguments={"family": encode(family), **asked}, tolerance=tolerance_of(asked),
                expected={"calls": {"least": least, "most": most}})  # fmt: skip


def families() -> list[Case]:
    """Families over granularities, anchors, kernels, roots and outputs."""
    several = PlanFamily(shifted_schedule(4), FLOW, (0, 3), 2, roots=2, output=LeafOutput.SAMPLE)
    eight, half = shifted_schedule(8), Kernel(KernelKind.CPS, 0.5)
    return [
        grown("small", "SING-1 SING-3", SMALL),
        grown("single", "GRAN-6 SING-1", replace(SMALL, granularities=(1,))),
        grown("end", "GRAN-2 SING-1", replace(SMALL, granularities=(1, 3), stride_anchor="end")),
        grown("descending", "SING-3 GRAN-1", replace(SMALL, granularities=(3, 1))),
        grown("sample", "SING-5 SING-1", several),
        grown("roots", "SING-3 NOISE-3", replace(SMALL, ks=(0, 2), granularities=(1, 2), roots=2)),
        grown("constant", "KERN-3 SING-1", replace(SMALL, kernel=SDE, ks=(1,), granularities=(1, 2))),
        grown("cps", "KERN-4 SING-1", replace(SMALL, kernel=half, ks=(0, 2), granularities=(2,))),
        grown("eight-steps", "GRAN-1 SING-1", PlanFamily(eight, FLOW, (0, 4), 2, (2, 3))),
        grown("guided", "ROLL-4 SING-1", replace(SMALL, ks=(1,)), guidance=GUIDED),
        grown("sum", "LOGP-2 SING-2", replace(SMALL, ks=(0, 1), granularities=(1, 2)), reduction="sum"),
        grown("bfloat16", "ROLL-5 SING-3", replace(SMALL, ks=(0, 1), granularities=(1, 2)), storage="bfloat16"),
    ]  # fmt: skip


def all_rollouts() -> list[Case]:
    """All of them."""
    return [*rollouts(), *families()]
