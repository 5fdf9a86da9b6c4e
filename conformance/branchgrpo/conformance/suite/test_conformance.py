"""The conformance suite.

``pytest --pyargs branchgrpo.conformance.suite.test_conformance --branchgrpo-impl=module:Object``
"""

from collections.abc import Mapping
from typing import Any

import pytest

from branchgrpo.conformance.checks.base import OPERATION_CHECKS, TRACE_CHECKS, Check, Subject
from branchgrpo.conformance.record import Record
from branchgrpo.conformance.runner import OPERATION_MODULES, TRACE_MODULES, Result, run_check

assert TRACE_MODULES
assert OPERATION_MODULES


def named(check: Check[Any]) -> Any:
    """A check as a parameter, with its clause as a marker."""
    return pytest.param(check, id=f"{check.clause}-{check.name}", marks=pytest.mark.clause(check.clause))


def settle(result: Result, expected: Mapping[str, str]) -> None:
    """Pass, fail, skip with the reason, or expect the failure."""
    if result.status == "unsupported":
        pytest.skip(f"unsupported: {result.detail}")
    if result.status == "failed" and result.clause in expected:
        pytest.xfail(f"{expected[result.clause]}: {result.detail}")
    if result.status == "failed":
        pytest.fail(f"{result.clause}: {result.detail}", pytrace=False)


def test_cases_run(branchgrpo_records: tuple[list[Record], list[Result]], branchgrpo_xfails: Mapping[str, str]) -> None:
    """Every case that the subject has the operations for can be driven (TRACE-4)."""
    results = sorted(branchgrpo_records[1], key=lambda result: ("failed", "passed", "unsupported").index(result.status))
    settle(results[0], branchgrpo_xfails)


@pytest.mark.parametrize("check", [named(check) for check in TRACE_CHECKS])
def test_trace(
    check: Check[Any],
    branchgrpo_records: tuple[list[Record], list[Result]],
    branchgrpo_xfails: Mapping[str, str],
) -> None:
    """What can be seen in the records of a run."""
    if not branchgrpo_records[0]:
        pytest.skip("unsupported: no case could be driven")
    settle(run_check(check, branchgrpo_records[0]), branchgrpo_xfails)


@pytest.mark.parametrize("check", [named(check) for check in OPERATION_CHECKS])
def test_operation(check: Check[Any], branchgrpo_subject: Subject, branchgrpo_xfails: Mapping[str, str]) -> None:
    """What single operations answer."""
    settle(run_check(check, branchgrpo_subject), branchgrpo_xfails)
