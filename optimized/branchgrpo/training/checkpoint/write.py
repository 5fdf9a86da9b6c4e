"""Write a checkpoint so that whatever happens, the folder of its name is complete or absent."""

import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from branchgrpo.reference.errors import InputError, is_integer
from branchgrpo.training.checkpoint.errors import CheckpointError, not_written
from branchgrpo.training.checkpoint.layout import (
    CHECKPOINTS,
    CONFIG,
    EMA,
    MANIFEST,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    flush,
    sha256,
    step_folder,
    steps,
)
from branchgrpo.training.checkpoint.retention import remove, remove_leftovers, retain
from branchgrpo.training.checkpoint.state import FORMAT, TrainState, to_json

SLACK = 1 << 20
"""Bytes kept free beside the tensors, for the headers, the JSON and the folder itself."""

OnStage = Callable[[str], None]
STAGES = ("half-written", "before-fsync", "before-rename", "before-retention")
"""Moments of a save at which ``on_stage`` is called, in order."""


def no_stage(stage: str) -> None:
    """Do nothing."""


def save(run_folder: Path, state: TrainState, keep: int = 0, on_stage: OnStage | None = None) -> Path:
    """Write ``run_folder/checkpoints/step-NNNNNN``; one process of the run calls it (rank 0).

    All files go to a temporary folder beside the target; each is flushed to the disk, and so is the folder; then the
    folder gets its name, in one step. Only after that older checkpoints beyond ``keep`` are removed, and what killed
    writes left behind.

    Args:
        run_folder: of the run.
        state: what to save.
        keep: newest checkpoints that stay; 0 keeps all.
        on_stage: called with each name of ``STAGES`` as it is reached.

    Returns:
        The checkpoint's folder.

    Raises:
        InputError: a negative ``keep``.
        CheckpointError: no space, no permission, a read-only or broken disk; earlier checkpoints are untouched.
    """
    if not is_integer(keep) or keep < 0:
        raise InputError("keep", keep, "an integer ≥ 0")
    notify, root, target = on_stage or no_stage, run_folder / CHECKPOINTS, step_folder(run_folder, state.iteration)
    older = next(reversed(steps(run_folder)), None)
    temporary = root / f".writing-{target.name}-{secrets.token_hex(4)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(root)
        check_space(root, state, older)
        temporary.mkdir()
        write_files(temporary, state, notify)
        notify("before-rename")
        if target.exists():  # the run went back to an earlier checkpoint, which is still there
            remove(target)
        temporary.rename(target)
        flush(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        legal = "writable, on a disk with room: nothing of this checkpoint was kept"
        raise not_written(root, error, legal, older) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    notify("before-retention")
    try:
        retain(run_folder, keep, target)
    except OSError as error:
        raise CheckpointError(f"checkpoint folder {root}", str(error), f"free to tidy up; {target} is saved") from error
    return target


def check_space(root: Path, state: TrainState, older: Path | None) -> None:
    """See that the disk has room before anything is written.

    Raises:
        CheckpointError: names the folder, what it has and what it needs.
    """
    groups = (state.weights, state.optimizer.tensors, state.ema or {})
    needed = SLACK + sum(t.numel() * t.element_size() for group in groups for t in group.values())
    free = shutil.disk_usage(root).free
    if free < needed:
        raise not_written(root, f"{free:,} bytes free", f"on a disk with {needed:,} bytes free", older)


def write_files(folder: Path, state: TrainState, notify: OnStage) -> None:
    """Write every file of a checkpoint and wait until they are on the disk; the manifest is the last."""
    write_tensors(folder / WEIGHTS, state.weights)
    notify("half-written")
    write_tensors(folder / OPTIMIZER, state.optimizer.tensors)
    if state.ema is not None:
        write_tensors(folder / EMA, state.ema)
    write_text(folder / CONFIG, state.config)
    write_text(folder / STATE, json.dumps(to_json(state), indent=1))
    names = sorted(path.name for path in folder.iterdir())
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in names}
    write_text(folder / MANIFEST, json.dumps({"format": FORMAT, "files": files}, indent=1))
    notify("before-fsync")
    for path in (*folder.iterdir(), folder):
        flush(path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, readable for those who may read the folder."""
    save_file(dict(tensors), path)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 without translating line ends."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        stream.write(text)
