"""The verdict clause by clause, as data, and the list of expected failures."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from branchgrpo.conformance.clauses import Clause, load_clauses
from branchgrpo.conformance.runner import Result, Status, verdict
from branchgrpo.reference.errors import InputError

SPEC_VERSION = "1.0"
NOT_JUDGED = "not judged"
"""How the reason of an unsupported clause begins whose case could not be driven because it failed."""

XFAIL = re.compile(r"(?P<clause>[A-Z]{3,}-\d+)\s+#\s*(?P<reason>\S.*)")


@dataclass(frozen=True)
class Report:
    """Results of one subject.

    Attributes:
        implementation: its name.
        results: one a check.
        clauses: the specification's clauses.
    """

    implementation: str
    results: Sequence[Result]
    clauses: Sequence[Clause]

    def statuses(self) -> dict[str, Status]:
        """Status of every clause that a check judges."""
        return verdict(self.results)

    def failed_musts(self) -> list[str]:
        """MUST clauses that failed."""
        levels = {clause.id: clause.level for clause in self.clauses}
        return [c for c, status in self.statuses().items() if status == "failed" and levels.get(c, "MUST") == "MUST"]

    def judged_musts(self) -> list[str]:
        """MUST clauses that passed or failed, expectedly or not."""
        levels = {clause.id: clause.level for clause in self.clauses}
        return [
            c for c, status in self.statuses().items() if status != "unsupported" and levels.get(c, "MUST") == "MUST"
        ]

    def faults(self) -> list[tuple[Result, list[str]]]:
        """Results that failed, expectedly or not, one a clause and message, with the checks or cases that gave it."""
        found: dict[tuple[str, str, str], tuple[Result, list[str]]] = {}
        for result in self.results:
            if result.status in ("failed", "xfailed"):
                key = (result.clause, result.status, result.detail)
                found.setdefault(key, (result, []))[1].append(result.check)
        return list(found.values())

    def reasons(self) -> dict[str, list[str]]:
        """Why checks are unsupported: reason → clauses, in the order of the results."""
        found: dict[str, dict[str, None]] = {}
        for result in self.results:
            if result.status == "unsupported":
                found.setdefault(result.detail, {})[result.clause] = None
        return {reason: list(clauses) for reason, clauses in found.items()}

    def data(self) -> dict[str, Any]:
        """The report as JSON holds it."""
        levels, found = {clause.id: clause.level for clause in self.clauses}, self.statuses()
        rows = {}
        for clause in sorted(found, key=clause_order):
            checks = [
                {"check": r.check, "status": r.status, **({"detail": r.detail} if r.detail else {})}
                for r in self.results
                if r.clause == clause
            ]
            rows[clause] = {"level": levels.get(clause, "MUST"), "status": found[clause], "checks": checks}
        return {"implementation": self.implementation, "spec_version": SPEC_VERSION, "clauses": rows}


def clause_order(clause: str) -> tuple[str, int]:
    """Chapter prefix, then number."""
    prefix, number = clause.rsplit("-", 1)
    return prefix, int(number)


def make_report(implementation: str, results: Sequence[Result], expected: Mapping[str, str]) -> Report:
    """A report in which failures of expected clauses are ``xfailed``.

    Args:
        implementation: name.
        results: one a check.
        expected: clause → reason, from ``read_xfails``.
    """
    clauses, _ = load_clauses()
    marked = [
        replace(r, status="xfailed", detail=f"{expected[r.clause]}: {r.detail}")
        if r.status == "failed" and r.clause in expected
        else r
        for r in results
    ]
    return Report(implementation, marked, clauses)


def read_xfails(path: Path | None) -> dict[str, str]:
    """Expected failures: lines ``CLAUSE  # reason``; blank lines and lines that start with # are skipped.

    Raises:
        InputError: a missing file, a line of another form, or a clause that the specification does not have.
    """
    if path is None:
        return {}
    if not path.is_file():
        raise InputError("xfails", str(path), "an existing file")
    known = {clause.id for clause in load_clauses()[0]}
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = XFAIL.fullmatch(line.strip())
        if match is None:
            raise InputError(f"{path.name}:{number}", line, "CLAUSE  # reason")
        if match["clause"] not in known:
            raise InputError(f"{path.name}:{number}", match["clause"], "a clause of the specification")
        found[match["clause"]] = match["reason"]
    return found
