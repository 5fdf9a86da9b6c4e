"""The kill matrix: which check kills which mutant."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from branchgrpo.conformance.capture import capture
from branchgrpo.conformance.case import Case
from branchgrpo.conformance.cases import all_cases
from branchgrpo.conformance.checks.base import OPERATION_CHECKS, TRACE_CHECKS, Subject
from branchgrpo.conformance.mutants import (
    noise_faults,
    plan_faults,
    pruning_faults,
    rollout_faults,
    tail_faults,
    trace_faults,
    update_faults,
)
from branchgrpo.conformance.mutants.base import MUTANTS, Mutant
from branchgrpo.conformance.mutants.plain import PlainImplementation
from branchgrpo.conformance.record import Record
from branchgrpo.conformance.record_io import write_trace
from branchgrpo.conformance.runner import Result, run_operation_checks, run_trace_checks, run_trace_file
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.implementation import Implementation
from branchgrpo.reference.noise import KeyedNoise

FAULTS = (rollout_faults, noise_faults, plan_faults, tail_faults, pruning_faults, trace_faults, update_faults)
"""The modules whose import registers the mutants."""

READ_CLAUSES = {"trace.schema": "TRACE-6", "node.": "TRACE-2"}
"""The clause that an unreadable trace breaks, by the field that its refusal names; TRACE-7 for all others."""


@dataclass
class Matrix:
    """Mutants and checks, and who killed whom.

    Attributes:
        mutants: name → clause, published row and checks that kill it.
        checks: name → clause and mutants that it kills.
    """

    mutants: dict[str, dict[str, object]] = field(default_factory=dict)
    checks: dict[str, dict[str, object]] = field(default_factory=dict)

    def survivors(self) -> list[str]:
        """Mutants that no check of their own clause kills."""
        return [name for name, row in self.mutants.items() if not row["killed_by_own_clause"]]

    def idle(self) -> list[str]:
        """Checks that kill nothing."""
        return [name for name, row in self.checks.items() if not row["kills"]]

    def not_from_the_trace(self) -> list[str]:
        """Mutants of published faults that no trace check kills."""
        return [n for n, row in self.mutants.items() if row["published"] and not row["killed_from_trace"]]


def drive(implementation: Implementation, cases: dict[str, Case]) -> list[Record]:
    """The records of all cases; a case that raises is reported by the exception's case name."""
    return [record for case in cases.values() for record in capture(implementation, case, KeyedNoise(case.seed))]


def read_results(path: Path) -> list[Result]:
    """Results of a trace file; a refusal to read it fails the clause of the field at fault."""
    try:
        return run_trace_file(path)
    except InputError as error:
        clause = next((c for part, c in READ_CLAUSES.items() if part in error.field), "TRACE-7")
        return [Result("traces_can_be_read", clause, "failed", str(error))]


def judge(mutant: Mutant, cases: dict[str, Case], base: Sequence[Record]) -> tuple[list[Result], list[Result]]:
    """Results of the trace checks and of the operation checks on one mutant."""
    if mutant.records is not None:
        return run_trace_checks(mutant.records(base)), []
    if mutant.file is not None:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace.safetensors"
            write_trace(path, base, mutant.name, "1")
            mutant.file(path)
            return read_results(path), []
    assert mutant.implementation is not None
    implementation = mutant.implementation()
    operations = run_operation_checks(Subject(implementation))
    try:
        records = drive(implementation, cases)
    except Exception as error:
        return [Result("cases_run", "TRACE-4", "failed", f"{type(error).__name__}: {error}")], operations
    return run_trace_checks(records), operations


def kill_matrix(names: Sequence[str] | None = None, progress: Callable[[str], None] = lambda name: None) -> Matrix:
    """Judge mutants, all of them by default.

    Args:
        names: mutants to judge.
        progress: called with each mutant's name before it is judged.
    """
    cases, matrix = all_cases(), Matrix()
    base = drive(PlainImplementation(), cases)
    known = [(c.name, c.clause) for c in TRACE_CHECKS] + [(c.name, c.clause) for c in OPERATION_CHECKS]
    matrix.checks = {name: {"clause": clause, "kills": []} for name, clause in known}
    for name in names or list(MUTANTS):
        mutant = MUTANTS[name]
        progress(name)
        trace, operations = judge(mutant, cases, base)
        killed = [r for r in [*trace, *operations] if r.status == "failed"]
        matrix.mutants[name] = {
            "clause": mutant.clause,
            "published": mutant.published,
            "killed_by": sorted({r.check for r in killed}),
            "killed_by_own_clause": any(r.clause == mutant.clause for r in killed),
            "killed_from_trace": any(r.status == "failed" for r in trace),
        }
        for result in killed:
            row = matrix.checks.setdefault(result.check, {"clause": result.clause, "kills": []})
            kills = row["kills"]
            assert isinstance(kills, list)
            kills.append(name)
    return matrix
