"""Running checks and collecting a verdict a clause."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from branchgrpo.conformance.checks import (
    trace_families,
    trace_fusion,
    trace_noise,
    trace_normalization,
    trace_steps,
    trace_training,
)
from branchgrpo.conformance.checks.base import TRACE_CHECKS, Check, CheckFailedError, UnsupportedError
from branchgrpo.conformance.record import Record, validate_record

Status = Literal["passed", "failed", "unsupported", "xfailed"]
Judged = TypeVar("Judged")
TRACE_MODULES = (trace_families, trace_fusion, trace_noise, trace_normalization, trace_steps, trace_training)
"""The modules whose import registers the trace checks."""


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
        return Result(check.name, check.clause, "failed", f"{type(error).__name__}: {error}")
    return Result(check.name, check.clause, "passed")


def run_trace_checks(records: Sequence[Record]) -> list[Result]:
    """All trace checks, first of all whether the records are well-formed (TRACE-7)."""
    form = Check("records_are_well_formed", "TRACE-7", well_formed, "Arrays have the plan's shapes, and finite values.")
    first = run_check(form, records)
    if first.status == "failed":
        return [first]
    return [first, *(run_check(check, records) for check in TRACE_CHECKS)]


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


Progress = Callable[[str], None]
