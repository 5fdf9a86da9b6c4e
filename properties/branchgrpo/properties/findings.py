"""What a check found: one row of the table that ends a run."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from branchgrpo.properties.budget import ALPHA
from branchgrpo.reference.errors import OptionError


@dataclass(frozen=True)
class Finding:
    """A statistical check (``p`` and ``detectable``) or an exact one (``tolerance``; ``p`` is None).

    Attributes:
        name: what was checked, readable on its own.
        clause: the clause it judges, or several separated by spaces.
        n: sample size, or number of comparisons.
        statistic: the value judged; of an exact check the largest error.
        p: p-value, exact or conservative.
        detectable: smallest discrepancy that the check finds with power 0.999, in the unit of its statistic's target.
        tolerance: largest error that passes.
        alpha: level at which ``p`` is judged.
        seconds: what it took.
    """

    name: str
    clause: str
    n: int
    statistic: float
    p: float | None = None
    detectable: float | None = None
    tolerance: float | None = None
    alpha: float = ALPHA
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if (self.p is None) == (self.tolerance is None):
            raise OptionError("finding", self.name, "judged by a p-value or by a tolerance, one of the two")
        if (self.p is None) != (self.detectable is None):
            raise OptionError("detectable", self.detectable, "stated if and only if there is a p-value")

    @property
    def passed(self) -> bool:
        """Whether p > α, or the error is within the tolerance; a NaN does not pass."""
        if self.p is not None:
            return self.p > self.alpha
        assert self.tolerance is not None
        return self.statistic <= self.tolerance

    def row(self) -> dict[str, Any]:
        """The JSON row: name, clause, n, statistic, p, detectable, tolerance, seconds, passed."""
        return {key: value for key, value in asdict(self).items() if key != "alpha"} | {"passed": self.passed}

    def __str__(self) -> str:
        judged = f"p = {self.p:.3g}, α = {self.alpha:.3g}" if self.p is not None else f"tolerance {self.tolerance:.3g}"
        return f"{self.name} [{self.clause}]: {self.statistic:.6g} at n = {self.n} ({judged})"


def worst(findings: Iterable[Finding]) -> list[Finding]:
    """One row a name: of exact checks the one that used most of its tolerance, with n and seconds summed.

    Statistical rows are kept one by one: each used a slot of the budget.
    """
    rows: dict[object, Finding] = {}
    for finding in findings:
        key: object = finding.name if finding.p is None else object()
        if key not in rows:
            rows[key] = finding
            continue
        before = rows[key]
        larger = max(before, finding, key=_used)
        rows[key] = replace(larger, n=before.n + finding.n, seconds=before.seconds + finding.seconds)
    return list(rows.values())


def _used(finding: Finding) -> float:
    """Error as a share of the tolerance; a NaN counts as infinite."""
    assert finding.tolerance is not None
    if not finding.statistic <= finding.tolerance:
        return float("inf")
    return finding.statistic / finding.tolerance if finding.tolerance > 0 else 0.0


def failures(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Those that did not pass."""
    return (finding for finding in findings if not finding.passed)
