"""The ledger of a run: every finding, the budget it used, the table and the report."""

import json
import time
from collections.abc import Iterable
from pathlib import Path

from branchgrpo.properties.budget import FALSE_ALARM, SLOTS, holm
from branchgrpo.properties.findings import Finding, failures, worst

HEADER = ("check", "clause", "n", "statistic", "p", "detectable", "tolerance", "time")


def number(value: float | None) -> str:
    """Three digits, or a dash where there is nothing."""
    return "–" if value is None else f"{value:.3g}"


def cells(finding: Finding) -> tuple[str, ...]:
    """One row of the table, as text."""
    name = finding.name if finding.passed else f"FAILED {finding.name}"
    numbers = (finding.statistic, finding.p, finding.detectable, finding.tolerance)
    return (name, finding.clause, f"{finding.n:,}", *(number(x) for x in numbers), f"{finding.seconds:.1f} s")


class Ledger:
    """Collects findings while the tests run.

    Attributes:
        findings: in the order judged.
        rejected: names that Holm's step-down rejects at the end although each passed its own level.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.started = time.perf_counter()

    def start(self) -> None:
        """The clock of the next findings starts now."""
        self.started = time.perf_counter()

    def judge(self, found: Iterable[Finding]) -> None:
        """Keep the findings, with the time since the last call shared among them, and fail if one did not pass."""
        new = list(found)
        assert new, "a check without a finding checks nothing"
        share = (time.perf_counter() - self.started) / len(new)
        self.findings += [Finding(**{**f.__dict__, "seconds": f.seconds or share}) for f in new]
        self.start()
        failed = [str(f) for f in failures(new)]
        assert not failed, "\n".join(failed)

    @property
    def judged(self) -> int:
        """p-values judged so far."""
        return sum(f.p is not None for f in self.findings)

    def over_budget(self) -> bool:
        """Whether more p-values were judged than the budget was split for."""
        return self.judged > SLOTS

    def holm_rejections(self) -> list[Finding]:
        """Findings that Holm's step-down rejects within the run's budget; it rejects at least what Bonferroni does."""
        statistical = [f for f in self.findings if f.p is not None]
        if not statistical:
            return []
        p_values = [f.p for f in statistical if f.p is not None]
        rejected = holm(p_values, FALSE_ALARM, max(SLOTS, len(p_values)))
        return [f for f, reject in zip(statistical, rejected, strict=True) if reject]

    def table(self) -> list[str]:
        """The lines of the table, exact checks of one name merged into their worst."""
        rows = [HEADER, *(cells(f) for f in worst(self.findings))]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        used = f"{self.judged} of {SLOTS} p-values of a false-alarm budget of {FALSE_ALARM:g} a run used"
        return [*lines, used]

    def write(self, path: Path) -> None:
        """The report: a JSON list of rows."""
        rows = [finding.row() for finding in worst(self.findings)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=True) + "\n", encoding="utf-8")
