"""Everything that a run writes down, behind one object: JSON lines, progress, TensorBoard, W&B, grids."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from branchgrpo.training.config.schema import LoggingConfig, TrainConfig
from branchgrpo.training.evaluation.evaluate import Evaluation
from branchgrpo.training.logs.grids import save_grid
from branchgrpo.training.logs.jsonl import JsonLines
from branchgrpo.training.logs.progress import TrainingProgress
from branchgrpo.training.logs.records import end_record, evaluation_record, iteration_record, start_record
from branchgrpo.training.logs.tensorboard import TensorBoard, require_tensorboard
from branchgrpo.training.logs.wandb import WeightsAndBiases, require_wandb
from branchgrpo.training.monitors.limits import Finding

GRIDS = "grids"


class Board(Protocol):
    """A place that shows numbers and pictures by iteration."""

    def numbers(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Take numbers."""
        ...

    def grid(self, iteration: int, path: Path) -> None:
        """Take a picture."""
        ...

    def close(self) -> None:
        """End."""
        ...


def check_logging(config: LoggingConfig) -> None:
    """Raise ``OptionError`` for a board whose package is not installed: before anything is trained."""
    if config.tensorboard:
        require_tensorboard()
    if config.wandb != "off":
        require_wandb(config.wandb)


@dataclass(eq=False)
class Journal:
    """The log of a run, which its first process keeps.

    Attributes:
        folder: of the run.
        lines: ``metrics.jsonl``.
        progress: on the console, or None.
        boards: TensorBoard, W&B.
        clock: seconds since the epoch.
    """

    folder: Path
    lines: JsonLines
    progress: TrainingProgress | None = None
    boards: Sequence[Board] = ()
    clock: Callable[[], float] = time.time

    def start(self, iteration: int, processes: int, device: str, facts: Mapping[str, Any]) -> None:
        """Note down that a process begins or goes on; see ``start_record``."""
        self.lines.write(start_record(iteration, self.clock(), processes=processes, device=device, facts=facts))

    def iteration(
        self,
        iteration: int,
        metrics: Mapping[str, float],
        seconds: Mapping[str, float],
        findings: Sequence[Finding] = (),
    ) -> None:
        """Note down one iteration (its index, from 0); boards count the iterations that are done, as evaluations do."""
        self.lines.write(iteration_record(iteration, self.clock(), metrics, seconds, findings))
        for board in self.boards:
            board.numbers(iteration + 1, {**metrics, **{f"seconds/{name}": value for name, value in seconds.items()}})
        if self.progress is not None:
            self.progress.findings(iteration, findings)
            self.progress.iteration(iteration + 1, metrics)

    def evaluation(
        self,
        iteration: int,
        evaluation: Evaluation,
        metrics: Mapping[str, float],
        findings: Sequence[Finding],
        seconds: float,
        averaged: bool,
    ) -> None:
        """Note down an evaluation after ``iteration`` iterations, and save its sample grid."""
        path = save_grid(evaluation.pictures, evaluation.by_prompt(), self.folder / GRIDS, iteration)
        grid = None if path is None else str(path.relative_to(self.folder))
        self.lines.write(
            evaluation_record(
                iteration, self.clock(), evaluation, metrics,
                seconds=seconds, averaged=averaged, grid=grid, findings=findings,
            )
        )  # fmt: skip
        for board in self.boards:
            board.numbers(iteration, metrics)
            if path is not None:
                board.grid(iteration, path)
        if self.progress is not None:
            self.progress.findings(iteration, findings, "evaluation")

    def end(self, iteration: int, reason: str, text: str = "") -> None:
        """Note down how the process ends; see ``end_record``."""
        self.lines.write(end_record(iteration, self.clock(), reason, text))

    def close(self) -> None:
        """Close everything; the terminal is left as it was."""
        if self.progress is not None:
            self.progress.close()
        for board in self.boards:
            board.close()
        self.lines.close()


def open_journal(
    config: TrainConfig, folder: Path, *, start: int = 0, length: int = 0, console: Console | None = None
) -> Journal:
    """The log of a run, or of its continuation.

    Args:
        config: of the run.
        folder: of the run; it exists.
        start: the first iteration to run.
        length: bytes of ``metrics.jsonl`` that the checkpoint knew; what follows them is cut off.
        console: where progress is shown; None is standard error.

    Raises:
        OptionError: a board whose package is not installed.
        InputError: a log that does not fit the checkpoint.
    """
    check_logging(config.logging)
    lines = JsonLines(folder, length)
    boards: list[Board] = []
    if config.logging.tensorboard:
        boards.append(TensorBoard(folder, start))
    if config.logging.wandb != "off":
        project, mode = config.logging.wandb_project, config.logging.wandb
        boards.append(WeightsAndBiases(folder, project=project, mode=mode, config=asdict(config), start=start))
    progress = TrainingProgress(config.run.iterations, start, console=console) if config.logging.progress else None
    return Journal(folder, lines, progress, boards)
