"""Names of the files and folders of a run's checkpoints, and how they reach the disk."""

import hashlib
import os
import re
from pathlib import Path

from branchgrpo.reference.errors import InputError, is_integer

CHECKPOINTS = "checkpoints"
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
EMA = "ema.safetensors"
STATE = "state.json"
CONFIG = "config.toml"
MANIFEST = "manifest.json"
REQUIRED = (WEIGHTS, OPTIMIZER, STATE, CONFIG)
OPTIONAL = (EMA,)
STEP = re.compile(r"step-(\d{6,})")
LEFTOVER = re.compile(r"\.(writing|removing)-step-\d{6,}-[0-9a-f]+")


def step_folder(run_folder: Path, iteration: int) -> Path:
    """Where the checkpoint goes after which ``iteration`` is the next to run.

    Raises:
        InputError: a negative iteration.
    """
    if not is_integer(iteration) or iteration < 0:
        raise InputError("iteration", iteration, "an integer ≥ 0")
    return run_folder / CHECKPOINTS / f"step-{iteration:06d}"


def step_of(folder: Path) -> int | None:
    """The iteration that a folder's name tells, or None for a folder of another name."""
    match = STEP.fullmatch(folder.name)
    return None if match is None else int(match[1])


def steps(run_folder: Path) -> list[Path]:
    """Folders of complete checkpoints, oldest first; a write that was killed has another name."""
    root = run_folder / CHECKPOINTS
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if STEP.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]
    return sorted(found, key=lambda path: (int(path.name.removeprefix("step-")), path.name))


def sha256(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, read piece by piece."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
