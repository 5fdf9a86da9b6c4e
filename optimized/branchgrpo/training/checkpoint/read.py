"""Read a checkpoint: every size and hash is verified before a tensor is used, and nothing is unpickled."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from branchgrpo.training.checkpoint.errors import CheckpointError, offer
from branchgrpo.training.checkpoint.layout import (
    CHECKPOINTS,
    CONFIG,
    EMA,
    MANIFEST,
    OPTIMIZER,
    OPTIONAL,
    REQUIRED,
    STATE,
    WEIGHTS,
    sha256,
    step_of,
    steps,
)
from branchgrpo.training.checkpoint.state import FORMAT, TrainState, from_json

TEXT_LIMIT = 64 << 20
"""Most bytes of a JSON or TOML file of a checkpoint: a page, where a corrupt one could fill the memory."""


def newest(run_folder: Path) -> Path | None:
    """The checkpoint with the highest iteration, or None; ``load`` says whether it is intact."""
    return next(reversed(steps(run_folder)), None)


def newest_intact(run_folder: Path, before: Path | None = None) -> Path | None:
    """The newest checkpoint whose files all have the sizes and hashes of their manifest.

    Args:
        run_folder: of the run.
        before: only checkpoints of earlier iterations than this one.
    """
    limit = None if before is None else step_of(before)
    for path in reversed(steps(run_folder)):
        if limit is not None and (step_of(path) or 0) >= limit:
            continue
        try:
            verify(path)
        except CheckpointError:
            continue
        return path
    return None


def load(path: Path) -> TrainState:
    """Verify and read a checkpoint.

    The tensors are views of the files, read as they are used, so that memory stays bounded; ``state.restore`` copies.

    Args:
        path: its folder, such as ``runs/train/checkpoints/step-000100``.

    Raises:
        CheckpointError: names the file, what is wrong with it, and the newest older checkpoint that is intact.
    """
    folder = path.resolve()
    try:
        files = verify(folder)
        tensors = {WEIGHTS: "weights", OPTIMIZER: "optimizer", EMA: "ema"}
        loaded = {key: read_tensors(folder / name) for name, key in tensors.items() if name in files}
        config = read_text(folder / CONFIG)
        return from_json(read_json(folder / STATE), config, loaded)
    except CheckpointError as error:
        if folder.parent.name != CHECKPOINTS:
            raise
        left = offer(newest_intact(folder.parent.parent, before=folder))
        raise CheckpointError(f"{error.field} ({folder})", error.value, f"{error.legal}; {left}") from error


def verify(folder: Path) -> Mapping[str, Any]:
    """Check that a checkpoint is what was written.

    Returns:
        The manifest: file name → bytes and SHA-256.

    Raises:
        CheckpointError: no checkpoint, a file that is missing, unknown, a link, cut short or altered.
    """
    if not folder.is_dir():
        raise CheckpointError("checkpoint", str(folder), "the folder of a checkpoint")
    files = read_manifest(folder)
    present = sorted(path.name for path in folder.iterdir())
    wanted = sorted([*files, MANIFEST])
    if present != wanted:
        missing, unknown = sorted({*wanted} - {*present}), sorted({*present} - {*wanted})
        raise CheckpointError("checkpoint: files", f"without {missing}, with {unknown}", "those of its manifest")
    for name, entry in files.items():
        file = folder / name
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(f"checkpoint: {name}", "a link or a folder", "a plain file")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"checkpoint: {name}", f"{size} bytes", f"{entry['bytes']} bytes, as written")
        try:
            found = sha256(file)
        except OSError as error:
            raise CheckpointError(f"checkpoint: {name}", str(error), "a readable file") from error
        if found != entry["sha256"]:
            legal = f"{str(entry['sha256'])[:12]}…, as written: the file is corrupt"
            raise CheckpointError(f"checkpoint: SHA-256 of {name}", f"{found[:12]}…", legal)
    return files


def read_manifest(folder: Path) -> Mapping[str, Any]:
    """The manifest's files; only names that a checkpoint has, so none that leads out of the folder.

    Raises:
        CheckpointError: no manifest, or one that no write of this version makes.
    """
    content = read_json(folder / MANIFEST)
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(files, dict):
        raise CheckpointError(f"checkpoint: {MANIFEST}", "of another format", f"of format {FORMAT}")
    unknown, missing = sorted(files.keys() - {*REQUIRED, *OPTIONAL}), sorted({*REQUIRED} - files.keys())
    if unknown or missing:
        legal = f"{list(REQUIRED)}, and maybe {list(OPTIONAL)}"
        raise CheckpointError(f"checkpoint: {MANIFEST}", f"without {missing}, with {unknown}", legal)
    for name, entry in files.items():
        plain = isinstance(entry, dict) and isinstance(entry.get("bytes"), int)
        if not plain or not isinstance(entry.get("sha256"), str):
            raise CheckpointError(f"checkpoint: {MANIFEST}: {name}", entry, "the file's bytes and sha256")
    return files


def read_text(path: Path) -> str:
    """A small UTF-8 file.

    Raises:
        CheckpointError: missing, too large, or no text.
    """
    try:
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"checkpoint: {path.name}", "missing", "a plain file")
        if path.stat().st_size > TEXT_LIMIT:
            raise CheckpointError(f"checkpoint: {path.name}", f"{path.stat().st_size} bytes", f"≤ {TEXT_LIMIT} bytes")
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"checkpoint: {path.name}", str(error), "a readable text file") from error


def read_json(path: Path) -> Any:
    """A small JSON file.

    Raises:
        CheckpointError: no JSON.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint: {path.name}", str(error), "the JSON that was written") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped and not copied.

    Raises:
        CheckpointError: no such file.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint: {path.name}", str(error), "a safetensors file") from error
