"""The folder of a run: made, locked against a second process, and never mixed with another run's."""

import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from branchgrpo.reference.errors import InputError

LOCK = "run.lock"
CONFIG = "config.toml"
METRICS = "metrics.jsonl"
EXPORT = "export"
PROMPTS = "prompt-cache"


@dataclass
class RunFolder:
    """Paths of a run, and the lock that this process holds on them."""

    path: Path
    held: IO[str] | None = field(default=None, repr=False)

    def release(self) -> None:
        """Give the lock back; the system does so, too, when a process dies."""
        if self.held is not None:
            self.held.close()
            self.held = None


def open_run_folder(path: Path, resume: bool) -> RunFolder:
    """Make the folder if need be, and lock it.

    Args:
        path: of the run.
        resume: the run is to go on; otherwise the folder must not hold one.

    Raises:
        InputError: a folder that cannot be written, that another process holds, or that has a run in it.
    """
    if not resume and any((path / name).exists() for name in (METRICS, "checkpoints", EXPORT)):
        raise InputError("run.folder", str(path), "a folder without a run; resume goes on from its newest checkpoint")
    try:
        path.mkdir(parents=True, exist_ok=True)
        held = (path / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise InputError("run.folder", str(path), f"a folder that can be written ({error.strerror})") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        held.seek(0)
        other = held.read().strip()
        held.close()
        raise InputError("run.folder", str(path), f"free: process {other} is training there") from None
    held.seek(0)
    held.truncate()
    held.write(str(os.getpid()))
    held.flush()
    return RunFolder(path, held)
