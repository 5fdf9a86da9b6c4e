"""What every stage of an audit sees, and what it hands back."""

from dataclasses import dataclass
from typing import Any, Literal

from branchgrpo.conformance.audit.setting import Setting
from branchgrpo.conformance.checks.base import Subject

Grade = Literal["reject", "condition", "note"]
Data = dict[str, Any]
"""What JSON holds, without NaN and infinities."""


@dataclass(frozen=True)
class Context:
    """The subject, the setting, and what was asked for.

    Attributes:
        subject: implementation and device.
        setting: the run's plan, backbone, dtypes and noise.
        expected: clauses that may fail, with reasons.
        rerun_mutants: judge all mutants again instead of reading the stored matrix.
    """

    subject: Subject
    setting: Setting
    expected: dict[str, str]
    rerun_mutants: bool = False

    def has(self, *operations: str) -> bool:
        """Whether the implementation has all these operations."""
        return set(operations) <= set(self.subject.implementation.capabilities)


def reason(grade: Grade, text: str, clause: str = "") -> Data:
    """One line of the verdict."""
    return {"grade": grade, "text": text, "clause": clause}


def missing(*operations: str) -> Data:
    """The result of a stage that the implementation lacks an operation for."""
    return {"unsupported": f"no operation {', '.join(operations)}", "reasons": []}
