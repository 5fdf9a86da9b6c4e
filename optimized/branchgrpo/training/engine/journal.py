"""Everything a run says about itself: JSON lines, progress, pictures; on the first rank only."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from branchgrpo.training.config.schema import LoggingConfig
from branchgrpo.training.evaluation.evaluate import Evaluation
from branchgrpo.training.logs.jsonl import JsonLines
from branchgrpo.training.logs.progress import TrainingProgress
from branchgrpo.training.logs.records import (
    Record,
    end_record,
    evaluation_record,
    iteration_record,
    start_record,
)
from branchgrpo.training.monitors.limits import Finding


class Journal:
    """The logs of a run that is going on.

    Args:
        folder: of the run.
        config: what is written beside ``metrics.jsonl``.
        total: iterations of the run.
        start: iterations that an earlier process has done.
        length: bytes of ``metrics.jsonl`` that stay.
    """

    def __init__(self, folder: Path, config: LoggingConfig, total: int, start: int, length: int) -> None:
        self.folder = folder
        self.lines = JsonLines(folder, length)
        self.progress = TrainingProgress(total, start) if config.progress else None

    def write(self, record: Record) -> None:
        """One line of the log."""
        self.lines.write(record)

    def start(self, iteration: int, processes: int, device: str, facts: Mapping[str, Any]) -> None:
        """A process begins or goes on."""
        self.write(start_record(iteration, time.time(), processes=processes, device=device, facts=facts))

    def iteration(
        self,
        iteration: int,
        metrics: Mapping[str, float],
        seconds: Mapping[str, float],
        findings: Sequence[Finding],
    ) -> None:
        """An iteration is done."""
        self.write(iteration_record(iteration, time.time(), metrics, seconds, findings))
        if self.progress is not None:
            self.progress.iteration(iteration + 1, metrics)
            self.progress.findings(iteration, findings)

    def evaluation(
        self,
        iteration: int,
        evaluation: Evaluation,
        metrics: Mapping[str, float],
        findings: Sequence[Finding],
        seconds: float,
        averaged: bool,
    ) -> None:
        """An evaluation was made after ``iteration`` iterations."""
        facts: dict[str, Any] = {"seconds": seconds, "averaged": averaged, "grid": None, "findings": findings}
        self.write(evaluation_record(iteration, time.time(), evaluation, metrics, **facts))
        if self.progress is not None:
            self.progress.findings(iteration, findings, "evaluation")

    def end(self, iteration: int, reason: str, text: str = "") -> None:
        """The process ends."""
        self.write(end_record(iteration, time.time(), reason, text))

    def close(self) -> None:
        """Write everything to disk and leave the terminal as it was."""
        if self.progress is not None:
            self.progress.close()
        self.lines.close()
