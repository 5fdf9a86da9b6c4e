"""How a run is going, on standard error: a bar with the time left on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from branchgrpo.training.monitors.limits import Finding

QUIET_S = 30.0
"""Seconds between two lines where there is no terminal."""
RECENT = 20
"""Iterations whose mean duration predicts the time left."""


def duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class TrainingProgress:
    """Shows iterations, rewards, time left, and findings of the monitors, each finding once until it has gone."""

    def __init__(
        self, total: int, start: int = 0, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin to show.

        Args:
            total: iterations of the run.
            start: iterations that an earlier process has done.
            console: where to; None is standard error.
            clock: seconds, for the rate.
        """
        self.console = console if console is not None else Console(stderr=True)
        self.total, self.done, self.clock = total, start, clock
        self.moments = [clock()]
        self.said = -float("inf")
        self.active: dict[str, set[str]] = {}
        self.bar: Progress | None = None
        if self.console.is_terminal:
            counts = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[line]}"))
            columns = (TextColumn("training"), BarColumn(), *counts)
            self.bar = Progress(*columns, console=self.console, refresh_per_second=4)
            self.task = self.bar.add_task("training", total=total, completed=start, line="")
            self.bar.start()

    def left(self) -> float | None:
        """Seconds until the end at the recent pace; None before the first iteration has ended."""
        recent = self.moments[-RECENT - 1 :]
        if len(recent) < 2:
            return None
        return (recent[-1] - recent[0]) / (len(recent) - 1) * (self.total - self.done)

    def iteration(self, done: int, metrics: Mapping[str, float]) -> None:
        """Show that ``done`` iterations are finished, the last one with these numbers."""
        self.done = done
        self.moments = [*self.moments[-RECENT:], self.clock()]
        left = self.left()
        line = f"{duration(left)} left" if left is not None else ""
        rewards = [
            f"{k.split('/')[1]} {v:.4g}" for k, v in metrics.items() if k.startswith("reward/") and k.endswith("/mean")
        ]
        line = "  ".join([line, *rewards])
        if self.bar is not None:
            self.bar.update(self.task, completed=done, line=line)
        elif self.moments[-1] - self.said >= QUIET_S or done >= self.total:
            self.said = self.moments[-1]
            self.say(f"iteration {done}/{self.total}  {line}")

    def findings(self, iteration: int, found: Sequence[Finding], kind: str = "iteration") -> None:
        """Show the findings that the one before of this kind (iteration, evaluation) did not have."""
        before = self.active.get(kind, set())
        self.active[kind] = {f"{finding.level} {finding.key}" for finding in found}
        for finding in found:
            if f"{finding.level} {finding.key}" not in before:
                style = "red" if finding.level == "stop" else "yellow"
                self.say(f"{kind} {iteration}: {finding.level}: {finding.text}", style)

    def say(self, text: str, style: str = "") -> None:
        """One line beside the bar; the text is shown as it is."""
        self.console.print(Text(text, style=style), soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.bar is not None:
            self.bar.stop()
