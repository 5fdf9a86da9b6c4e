"""Running an audit: stage after stage, each stored as soon as it is done, then the report."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from branchgrpo.conformance.audit.clauses import conformance, report_of
from branchgrpo.conformance.audit.concentration import effective_sample_size
from branchgrpo.conformance.audit.context import Context, Data
from branchgrpo.conformance.audit.costs import cost_table
from branchgrpo.conformance.audit.estimator import gradient_estimator
from branchgrpo.conformance.audit.kills import STORED, kill_matrix_data
from branchgrpo.conformance.audit.noise import branch_noise, sibling_covariance
from branchgrpo.conformance.audit.precision import precision_drift
from branchgrpo.conformance.audit.pruning import pruning_parity
from branchgrpo.conformance.audit.run_plan import run_of_the_plan
from branchgrpo.conformance.audit.setting import BackboneError, described
from branchgrpo.conformance.audit.store import context_key, hash_of, read_stage, write_stage, write_text
from branchgrpo.conformance.audit.verdict import decide
from branchgrpo.conformance.checks.base import UnsupportedError
from branchgrpo.conformance.junit import junit
from branchgrpo.conformance.report import SPEC_VERSION, make_report
from branchgrpo.conformance.runner import Result
from branchgrpo.training.audit_gate import SCHEMA, VERSION, digest_of


@dataclass(frozen=True)
class Stage:
    """A part of the audit.

    Attributes:
        name: of its file and its section.
        title: what the progress line says.
        run: makes its data.
    """

    name: str
    title: str
    run: Callable[[Context], Data]


STAGES = (
    Stage("clauses", "conformance, clause by clause", conformance),
    Stage("run", "the run's own plan and first update", run_of_the_plan),
    Stage("noise", "law of the branch noise", branch_noise),
    Stage("siblings", "covariance of siblings", sibling_covariance),
    Stage("concentration", "concentration of path weights", effective_sample_size),
    Stage("costs", "model calls and published counts", cost_table),
    Stage("estimator", "bias and variance of the gradient", gradient_estimator),
    Stage("pruning", "gradients under pruning", pruning_parity),
    Stage("precision", "ratios and rounding", precision_drift),
    Stage("mutants", "kill matrix", kill_matrix_data),
)
Progress = Callable[[int, Stage, bool], None]
"""Called with a stage's number before it runs; the last argument says whether its result was there already."""


def run_stage(stage: Stage, context: Context) -> Data:
    """A stage's data; what the implementation cannot do is a condition, what it breaks on is a reason to reject."""
    started = time.perf_counter()
    try:
        data = stage.run(context)
    except BackboneError:
        raise
    except UnsupportedError as found:
        data = {"unsupported": str(found), "reasons": []}
    except Exception as error:
        text = f"{stage.title}: {type(error).__name__}: {error}"[:500]
        data = {"error": text, "reasons": [{"grade": "reject", "text": text, "clause": ""}]}
    return data | {"seconds": round(time.perf_counter() - started, 2)}


def run_stages(out: Path, implementation: str, context: Context, progress: Progress) -> dict[str, Data]:
    """All stages, from ``out/stages`` where they were run before on the same inputs and sources."""
    key, found = context_key(implementation, context), {}
    for number, stage in enumerate(STAGES):
        own = key
        if stage.name == "mutants":
            stored = STORED.read_text(encoding="utf-8") if STORED.is_file() else ""
            own = hash_of([key, context.rerun_mutants, stored])
        data = read_stage(out / "stages", stage.name, own)
        progress(number, stage, data is not None)
        if data is None:
            data = write_stage(out / "stages", stage.name, own, run_stage(stage, context))
        found[stage.name] = data
    return found


def results_of(stages: dict[str, Data]) -> list[Result]:
    """Everything that passes or fails, as check results: clauses, the run's trace, statistics."""
    found = []
    for name in ("clauses", "run"):
        for row in stages[name].get("results", []):
            found.append(
                Result(f"{row['check']}{' (run)' * (name == 'run')}", row["clause"], row["status"], row["detail"])
            )
    for name in ("noise", "siblings"):
        for row in stages[name].get("rows", []):
            detail = f"n = {row['n']}, statistic {row['statistic']:.4g}, p = {row['p']:.3g}"
            found.append(Result(row["check"], row["clause"], "passed" if row["passed"] else "failed", detail))
    return found


def run_audit(
    out: Path,
    implementation: str,
    context: Context,
    progress: Progress = lambda number, stage, stored: None,
) -> Data:
    """Audit, and write ``report.html``, ``audit.json`` and ``junit.xml`` into ``out``.

    Args:
        out: folder; made if it is not there. Its ``stages`` hold what a repeated run reads.
        implementation: its name as it was given.
        context: subject and setting.
        progress: told of every stage.

    Returns:
        The document of ``audit.json``.
    """
    from branchgrpo.conformance.audit.report import render_report

    stages = run_stages(out, implementation, context, progress)
    document: Data = {
        "schema": SCHEMA,
        "version": VERSION,
        "spec_version": SPEC_VERSION,
        "implementation": context.subject.implementation.name,
        "device": str(context.subject.device),
        "setting": described(context.setting),
        "audited": context.setting.identity.data(),
        "verdict": decide(stages),
        "stages": stages,
    }
    document = {**document, "digest": digest_of(json.loads(json.dumps(document, allow_nan=False)))}
    clauses = report_of(stages["clauses"], context.expected) if "results" in stages["clauses"] else None
    named = clauses.implementation if clauses else context.subject.implementation.name
    everything = make_report(named, results_of(stages), context.expected)
    write_text(out / "junit.xml", junit(everything))
    write_text(out / "audit.json", json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_text(out / "report.html", render_report(document, everything))
    return document
