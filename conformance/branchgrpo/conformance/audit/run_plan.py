"""Stage: the run itself: its plan, backbone, dtypes and noise source, rolled out and judged from the trace."""

from branchgrpo.conformance.audit.context import Context, Data, missing, reason
from branchgrpo.conformance.capture import capture
from branchgrpo.conformance.record import Record
from branchgrpo.conformance.runner import run_trace_checks
from branchgrpo.reference.counts import count

MOST_EDGES = 1200
"""Trained edges whose ratios are asked for one by one: beyond, the update is not driven."""


def trained_edges(context: Context) -> int:
    """Trained edges of one rollout of all prompts."""
    setting = context.setting
    return count(setting.method, setting.config.iteration, setting.config.seed).trained_edges * setting.config.prompts


def ratio_drift(records: list[Record]) -> float | None:
    """Largest |ρ − 1| with unchanged weights; None if the update was not driven."""
    drifts = [
        float((level - 1).abs().max())
        for record in records
        if record.has("ratios")
        for level in record.levels["ratios"].values()
    ]
    return max(drifts) if drifts else None


def run_of_the_plan(context: Context) -> Data:
    """Roll the run out, drive its first update, and judge the trace; the drift against the clip range."""
    if not context.has("rollout"):
        return missing("rollout")
    setting = context.setting
    training = trained_edges(context) <= MOST_EDGES
    case = setting.case(context.subject.device, training)
    records = capture(context.subject.implementation, case, setting.noise())
    results = run_trace_checks(records)
    rows = [{"check": r.check, "clause": r.clause, "status": r.status, "detail": r.detail[:500]} for r in results]
    reasons = [
        reason(
            "condition" if r.clause in context.expected else "reject",
            f"the run's trace fails {r.clause}: {r.check.replace('_', ' ')}: {r.detail[:300]}",
            r.clause,
        )
        for r in results
        if r.status == "failed"
    ]
    clip = min(setting.method.objective.clip_low, setting.method.objective.clip_high)
    drift = ratio_drift(records)
    if drift is None:
        reasons.append(
            reason(
                "condition", "ratios not measured: too many trained edges, more siblings than elements, or no objective"
            )
        )
    elif clip / 100 < drift <= clip / 10:
        said = f"ratios of unchanged weights stray by {drift:.2g}, more than a hundredth of the clip range {clip:g}"
        reasons.append(reason("condition", said, "OBJ-1"))
    states = [list(record.levels["states"][0].shape) for record in records]
    return {
        "results": rows,
        "drift": drift,
        "clip": clip,
        "states": states,
        "records": len(records),
        "reasons": reasons,
    }
