"""Stage: what a prompt costs, counted, published, and as the implementation really calls the model."""

import tomllib

import torch

from branchgrpo.conformance.audit.context import Context, Data, missing, reason
from branchgrpo.conformance.audit.setting import MEAN, TAU, numbered_prompts
from branchgrpo.conformance.clauses import ROOT
from branchgrpo.conformance.subjects import Recorder, condition_for
from branchgrpo.models.gaussian import ExactGaussian
from branchgrpo.reference.counts import count, count_plan
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.presets import preset
from branchgrpo.reference.protocols import Guidance


def cost_table(context: Context) -> Data:
    """The papers' figures beside the counts of the presets, and the calls of one rollout of the run's plan."""
    table = tomllib.loads((ROOT / "spec" / "tables" / "results.toml").read_text(encoding="utf-8"))
    rows = []
    for entry in table["arithmetic"]:
        counts = count(preset(entry["preset"]))
        value = getattr(counts, entry["value"]) if entry["status"] == "reproduced" else None
        rows.append(
            {
                "row": entry["row"],
                "published": entry.get("published"),
                "count": value,
                "a_leaf": None if value is None else value / counts.leaves,
                "note": entry.get("note", ""),
                "agrees": value is None or value == entry["count"],
            }
        )
    families = [
        {"row": entry["row"], **{key: value for key, value in entry.items() if key.startswith("calls_")}}
        for entry in table["calls"]
    ]
    measured = calls_of_the_run(context) if context.has("rollout") else missing("rollout")
    return {"rows": rows, "families": families, "measured": measured, "reasons": measured.pop("reasons")}


def calls_of_the_run(context: Context) -> Data:
    """Items that the model evaluates in a rollout of one prompt, and the least that can do it."""
    plan: Plan = context.setting.plan()
    device, prompts = context.subject.device, numbered_prompts(1)
    recorder = Recorder(ExactGaussian(MEAN, TAU).to(device), Guidance())
    context.subject.implementation.rollout(
        plan,
        recorder,
        prompts,
        condition_for(prompts, torch.float64, device),
        context.setting.noise(),
        latent_shape=(4,),
        dtype=torch.float64,
        storage_dtype=torch.float64,
        reduction=context.setting.method.log_prob,
        iteration=context.setting.config.iteration,
    )
    least = count_plan(plan).denoiser_calls
    said = f"{recorder.items} model evaluations a prompt, {least} are enough"
    grade = "note" if recorder.items == least else "condition"
    return {
        "calls": recorder.items,
        "least": least,
        "leaves": plan.roots * plan.leaves,
        "reasons": [reason(grade, said, "ROLL-3")],  # type: ignore[arg-type]
    }
