"""Running checks and collecting a verdict a clause."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from branchgrpo.conformance.blame import describe
from branchgrpo.conformance.checks import (
    operation_errors,
    operation_objective,
    operation_rollout,
    operation_steps,
    operation_tail,
    trace_families,
    trace_fusion,
    trace_noise,
    trace_normalization,
    trace_steps,
    trace_training,
)
from branchgrpo.conformance.checks.base import (
    OPERATION_CHECKS,
    TRACE_CHECKS,
    Check,
    CheckFailedError,
    Subject,
    UnsupportedError,
)
from branchgrpo.conformance.record import Record, validate_record
from branchgrpo.conformance.record_io import read_trace
from branchgrpo.reference.errors import PlanError

Status = Literal["passed", "failed", "unsupported", "xfailed"]
Judged = TypeVar("Judged")
TRACE_MODULES = (trace_families, trace_fusion, trace_noise, trace_normalization, trace_steps, trace_training)
OPERATION_MODULES = (operation_errors, operation_objective, operation_rollout, operation_steps, operation_tail)
"""The modules whose import registers the checks."""


@dataclass(frozen=True)
class Result:
    """The outcome of one check."""

    check: str
    clause: str
    status: Status
    detail: str = ""


def run_check(check: Check[Judged], subject: Judged) -> Result:
    """Run one check; an exception that is no verdict is a failure of the subject, and says so."""
    try:
        check.run(subject)
    except UnsupportedError as reason:
        return Result(check.name, check.clause, "unsupported", str(reason))
    except CheckFailedError as error:
        return Result(check.name, check.clause, "failed", str(error))
    except Exception as error:
        return Result(check.name, check.clause, "failed", describe(error))
    return Result(check.name, check.clause, "passed")


def run_trace_checks(records: Sequence[Record]) -> list[Result]:
    """All trace checks, first of all whether the records are well-formed (TRACE-7)."""
    form = Check("records_are_well_formed", "TRACE-7", well_formed, "Arrays have the plan's shapes, and finite values.")
    first = run_check(form, records)
    if first.status == "failed":
        return [first]
    return [first, *(run_check(check, records) for check in TRACE_CHECKS)]


def run_operation_checks(subject: Subject) -> list[Result]:
    """All checks that drive operations one by one."""
    return [run_check(check, subject) for check in OPERATION_CHECKS]


def run_trace_file(path: Path) -> list[Result]:
    """Read a trace and run all trace checks; a plan that the specification does not allow fails its clause.

    Raises:
        InputError, OptionError: a file that is no trace.
    """
    try:
        _, records = read_trace(path)
    except PlanError as error:
        part = next((name for name in PLAN_CLAUSES if name in error.field), "plan")
        return [Result("plans_are_allowed", PLAN_CLAUSES.get(part, "PLAN-1"), "failed", str(error))]
    return run_trace_checks(records)


PLAN_CLAUSES = {
    "sigmas": "SCHED-1",
    "branching": "PLAN-3",
    "spreads": "PLAN-3",
    "trained_steps": "PLAN-6",
    "trained_fraction": "PLAN-7",
    "kernel": "KERN-5",
}
"""The clause that a plan breaks, by the field that its refusal names."""


def well_formed(records: Sequence[Record]) -> None:
    """Arrays have the shapes and dtypes that the plan implies, and finite values."""
    for r, record in enumerate(records):
        validate_record(record, str(r))


def verdict(results: Iterable[Result]) -> dict[str, Status]:
    """The status of every clause that was judged: failed beats passed, passed beats unsupported."""
    order: Mapping[Status, int] = {"failed": 0, "xfailed": 1, "passed": 2, "unsupported": 3}
    found: dict[str, Status] = {}
    for result in results:
        found[result.clause] = min(found.get(result.clause, result.status), result.status, key=lambda s: order[s])
    return found
