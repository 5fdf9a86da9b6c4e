"""Judging an implementation: all cases, all checks, one report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from branchgrpo.conformance.blame import describe
from branchgrpo.conformance.capture import capture
from branchgrpo.conformance.case import Case
from branchgrpo.conformance.cases import all_cases
from branchgrpo.conformance.checks.base import OPERATION_CHECKS, TRACE_CHECKS, Subject, UnsupportedError
from branchgrpo.conformance.record import Record
from branchgrpo.conformance.report import NOT_JUDGED, Report, make_report
from branchgrpo.conformance.runner import Result, run_check, run_trace_checks
from branchgrpo.reference.noise import KeyedNoise

CASE_NEEDS = {
    "family": {"singular_rollout", "granular_advantages", "fuse"},
    "fraction": {"trained_subsets"},
}
"""Operations that cases need beside ``rollout``, by the start of the case's name."""

TRACE = "TRACE-4"
"""The clause that a case that cannot be driven breaks."""

ROLLOUTS = ("in the operation rollout)", "in the operation singular_rollout)")
"""How ``describe`` ends for an exception of a rollout, which most checks start from."""


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
            results.append(Result(f"case_{name}_runs", TRACE, "unsupported", reason))
            continue
        try:
            records += record_case(subject, case)
        except UnsupportedError as reason:
            results.append(Result(f"case_{name}_runs", TRACE, "unsupported", str(reason)))
        except Exception as error:
            results.append(Result(f"case_{name}_runs", TRACE, "failed", describe(error)))
    if records and not any(result.status == "failed" for result in results):
        results.append(Result("cases_run", TRACE, "passed"))
    return records, results


def not_judged(driven: Sequence[Result], results: Sequence[Result]) -> list[Result]:
    """Results of checks, in which what could not be judged because a case failed says so, and points to the case.

    That is a trace check that lacks its record, and an operation check whose own rollout fails as the case's did: one
    fault is reported once.

    Args:
        driven: results of driving the cases.
        results: of the checks.
    """
    failed = [
        result.check.removeprefix("case_").removesuffix("_runs") for result in driven if result.status == "failed"
    ]
    if not failed:
        return list(results)
    named = ", ".join(failed[:3]) + (f" and {len(failed) - 3} more" if len(failed) > 3 else "")
    reason = f"{NOT_JUDGED}: the case failed, see {TRACE} ({named})"
    same = {result.detail for result in driven if result.status == "failed" and result.detail.endswith(ROLLOUTS)}
    traced = {check.name for check in TRACE_CHECKS}
    return [
        replace(result, status="unsupported", detail=reason)
        if (result.status == "unsupported" and result.check in traced) or result.detail in same
        else result
        for result in results
    ]


def judge(
    subject: Subject, expected: Mapping[str, str] | None = None, progress: Callable[[str], None] = lambda name: None
) -> Report:
    """Drive a subject through every case and run every check.

    Args:
        subject: implementation and device.
        expected: clauses that may fail, with reasons.
        progress: called with the name of each case and check.
    """
    records, driven = drive_cases(subject, progress)
    if records:
        progress("trace checks")
        found = run_trace_checks(records)
    else:
        found = [Result(c.name, c.clause, "unsupported", "no case could be driven") for c in TRACE_CHECKS]
    for check in OPERATION_CHECKS:
        progress(check.name)
        found.append(run_check(check, subject))
    return make_report(subject.implementation.name, [*driven, *not_judged(driven, found)], expected or {})
