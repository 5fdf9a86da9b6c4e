"""Judging an implementation: all cases, all checks, one report."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from branchgrpo.conformance.capture import Case, capture
from branchgrpo.conformance.cases import all_cases
from branchgrpo.conformance.checks.base import OPERATION_CHECKS, TRACE_CHECKS, Subject, UnsupportedError
from branchgrpo.conformance.record import Record
from branchgrpo.conformance.report import Report, make_report
from branchgrpo.conformance.runner import Result, run_check, run_trace_checks
from branchgrpo.reference.noise import KeyedNoise

CASE_NEEDS = {
    "family": {"singular_rollout", "granular_advantages", "fuse"},
    "fraction": {"trained_subsets"},
}
"""Operations that cases need beside ``rollout``, by the start of the case's name."""


def lacking(name: str, has: frozenset[str]) -> set[str]:
    """Operations that a case needs and the subject has not."""
    needed = next((needs for start, needs in CASE_NEEDS.items() if name.startswith(start)), set())
    return ({"rollout"} | needed if not name.startswith("family") else needed) - has


def record_case(subject: Subject, case: Case) -> list[Record]:
    """The records of one case on a subject's device."""
    placed = replace(case, device=subject.device)
    return capture(subject.implementation, placed, KeyedNoise(case.seed))


def drive_cases(subject: Subject, progress: Callable[[str], None]) -> tuple[list[Record], list[Result]]:
    """Records of every case as far as the subject's operations reach, and a result for each case without a record.

    A case is unsupported if the subject lacks an operation for it or answers with ``UnsupportedError``, and failed if
    it raises anything else.
    """
    has = frozenset(subject.implementation.capabilities)
    records: list[Record] = []
    results: list[Result] = []
    for name, case in all_cases().items():
        progress(name)
        if missing := lacking(name, has):
            reason = f"no operation {', '.join(sorted(missing))}"
            results.append(Result(f"case_{name}_runs", "TRACE-4", "unsupported", reason))
            continue
        try:
            records += record_case(subject, case)
        except UnsupportedError as reason:
            results.append(Result(f"case_{name}_runs", "TRACE-4", "unsupported", str(reason)))
        except Exception as error:
            results.append(Result(f"case_{name}_runs", "TRACE-4", "failed", f"{type(error).__name__}: {error}"))
    if records and not any(result.status == "failed" for result in results):
        results.append(Result("cases_run", "TRACE-4", "passed"))
    return records, results


def judge(
    subject: Subject, expected: Mapping[str, str] | None = None, progress: Callable[[str], None] = lambda name: None
) -> Report:
    """Drive a subject through every case and run every check.

    Args:
        subject: implementation and device.
        expected: clauses that may fail, with reasons.
        progress: called with the name of each case and check.
    """
    records, results = drive_cases(subject, progress)
    if records:
        progress("trace checks")
        results += run_trace_checks(records)
    else:
        results += [Result(c.name, c.clause, "unsupported", "no case could be driven") for c in TRACE_CHECKS]
    for check in OPERATION_CHECKS:
        progress(check.name)
        results.append(run_check(check, subject))
    return make_report(subject.implementation.name, results, expected or {})
