"""Logs and checkpoints tell one story: a resume cuts the logs to where the checkpoint was taken."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from branchgrpo.training.checkpoint.errors import CheckpointError
from branchgrpo.training.checkpoint.layout import flush

LOGS = ("metrics.jsonl", "scores.jsonl")


def log_lengths(run_folder: Path, names: Iterable[str] = LOGS) -> dict[str, int]:
    """Bytes of each log that exists, after they are on the disk; taken when a checkpoint is."""
    lengths = {}
    for name in names:
        path = run_folder / name
        if path.is_file():
            flush(path)
            lengths[name] = path.stat().st_size
    return lengths


def cut_logs(run_folder: Path, log_bytes: Mapping[str, int], names: Iterable[str] = LOGS) -> None:
    """Cut every log to its length in the checkpoint; one that came later is emptied.

    Args:
        run_folder: of the run.
        log_bytes: from the checkpoint.
        names: logs that the run may have.

    Raises:
        CheckpointError: a log that is missing or shorter than the checkpoint says, or a name that is none of the logs;
            nothing was cut then.
    """
    known = tuple(names)
    for name, length in log_bytes.items():
        path = run_folder / name
        if name not in known:
            raise CheckpointError("checkpoint: log_bytes", name, f"one of {list(known)}")
        found = path.stat().st_size if path.is_file() and not path.is_symlink() else None
        if found is None or found < length:
            legal = f"at least {length} bytes, what it had when the checkpoint was taken"
            raise CheckpointError(f"log {path}", "missing" if found is None else f"{found} bytes", legal)
    for name in known:
        path = run_folder / name
        if path.is_file():
            os.truncate(path, log_bytes.get(name, 0))
            flush(path)
