"""Judging an implementation: all cases, all checks, one report."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from branchgrpo.conformance.capture import Case, capture
from branchgrpo.conformance.cases import all_cases
from branchgrpo.conformance.checks.base import OPERATION_CHECKS, TRACE_CHECKS, Subject
from branchgrpo.conformance.record import Record
from branchgrpo.conformance.report import Report, make_report
from branchgrpo.conformance.runner import Result, run_check, run_trace_checks
from branchgrpo.reference.noise import KeyedNoise

NEEDED = ("rollout", "fuse", "normalize", "leaf_keys", "prune", "objective")
"""Operations without which no case can be driven."""


def record_case(subject: Subject, case: Case) -> list[Record]:
    """The records of one case on a subject's device."""
    placed = replace(case, device=subject.device)
    return capture(subject.implementation, placed, KeyedNoise(case.seed))


def drive_cases(subject: Subject, progress: Callable[[str], None]) -> tuple[list[Record], list[Result]]:
    """Records of every case that the subject has the operations for, and a failure for each one that raises."""
    has = set(subject.implementation.capabilities)
    records: list[Record] = []
    failures: list[Result] = []
    if missing := [name for name in NEEDED if name not in has]:
        return [], [Result("cases_run", "TRACE-4", "unsupported", f"no operation {', '.join(missing)}")]
    for name, case in all_cases().items():
        progress(name)
        family = name.startswith("family")
        if family and not has >= {"singular_rollout", "granular_advantages"}:
            continue
        if name == "fraction" and "trained_subsets" not in has:
            continue
        try:
            records += record_case(subject, case)
        except Exception as error:
            failures.append(Result(f"case_{name}_runs", "TRACE-4", "failed", f"{type(error).__name__}: {error}"))
    return records, failures or [Result("cases_run", "TRACE-4", "passed")]


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
