"""Judging the judge: every mutant dies by a check of its own clause, and every check kills."""

import json
import subprocess
import sys
from functools import cache

import pytest

from branchgrpo.conformance.cases import all_cases
from branchgrpo.conformance.checks.base import OPERATION_CHECKS, TRACE_CHECKS, Subject
from branchgrpo.conformance.clauses import ROOT, load_clauses
from branchgrpo.conformance.mutants.base import MUTANTS
from branchgrpo.conformance.mutants.matrix import drive
from branchgrpo.conformance.mutants.plain import PlainImplementation
from branchgrpo.conformance.record import Record
from branchgrpo.conformance.runner import run_operation_checks, run_trace_checks

STORED = json.loads((ROOT / "spec" / "studies" / "mutants.json").read_text(encoding="utf-8"))


@cache
def base() -> tuple[Record, ...]:
    """Records of the plain implementation, which is right."""
    return tuple(drive(PlainImplementation(), all_cases()))


def test_the_stored_matrix_is_of_today_and_complete():
    checks = {check.name for check in TRACE_CHECKS} | {check.name for check in OPERATION_CHECKS}
    assert set(STORED["mutants"]) == set(MUTANTS)
    assert checks <= set(STORED["checks"])
    assert [name for name, row in STORED["mutants"].items() if not row["killed_by_own_clause"]] == []
    assert [name for name, row in STORED["checks"].items() if not row["kills"]] == []
    assert {name: row["clause"] for name, row in STORED["mutants"].items()} == {n: m.clause for n, m in MUTANTS.items()}
    assert len(MUTANTS) >= 40


def test_mutants_and_checks_name_clauses():
    known = {clause.id for clause in load_clauses()[0]}
    assert {mutant.clause for mutant in MUTANTS.values()} <= known
    assert {check.clause for check in [*TRACE_CHECKS, *OPERATION_CHECKS]} <= known


def test_published_faults_die_from_the_trace_alone():
    published = {name: row for name, row in STORED["mutants"].items() if row["published"]}
    assert len(published) >= 20
    assert [name for name, row in published.items() if not row["killed_from_trace"]] == []


def test_without_the_checks_of_a_clause_some_mutant_lives():
    clause_of = {name: row["clause"] for name, row in STORED["checks"].items()}
    spared = {
        clause: [n for n, row in STORED["mutants"].items() if {clause_of[c] for c in row["killed_by"]} == {clause}]
        for clause in set(clause_of.values())
    }
    alone = sorted(clause for clause, names in spared.items() if names)
    assert {"NOISE-3", "PRUNE-5", "OBJ-5", "FUSE-5", "WIN-4", "GRAN-5"} <= set(alone)


@pytest.mark.slow
def test_the_plain_implementation_passes_every_check():
    results = [*run_trace_checks(base()), *run_operation_checks(Subject(PlainImplementation()))]
    assert [result for result in results if result.status != "passed"] == []


@pytest.mark.slow
def test_the_matrix_of_today_is_the_stored_one(tmp_path):
    """All mutants, by the command and without shape checks: with them it would take four times as long."""
    target = tmp_path / "mutants.json"
    code = "import sys; from branchgrpo.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "mutants", "--json", str(target)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(target.read_text(encoding="utf-8"))
    assert {name: row["killed_by_own_clause"] for name, row in found["mutants"].items()} == dict.fromkeys(MUTANTS, True)
    assert [name for name, row in found["checks"].items() if not row["kills"]] == []
