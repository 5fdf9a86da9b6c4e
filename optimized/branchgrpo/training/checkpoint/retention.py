"""Which checkpoints stay."""

import secrets
import shutil
from pathlib import Path

from branchgrpo.training.checkpoint.layout import CHECKPOINTS, LEFTOVER, flush, step_of, steps


def retain(run_folder: Path, keep: int, current: Path) -> None:
    """Keep the newest ``keep`` checkpoints up to the one just written, which always stays.

    Checkpoints of later iterations belong to a future that was given up when the run went back to an earlier one; they
    go too, unless all are kept.

    Args:
        run_folder: of the run.
        keep: how many stay; 0 keeps all.
        current: the one just written.
    """
    if keep == 0:
        return
    newest = step_of(current)
    past = [path for path in steps(run_folder) if newest is not None and (step_of(path) or 0) <= newest]
    stay = {path.name for path in past[-keep:]} | {current.name}
    for path in steps(run_folder):
        if path.name not in stay:
            remove(path)
    remove_leftovers(run_folder / CHECKPOINTS)


def remove(checkpoint: Path) -> None:
    """Take a checkpoint's name away in one step, then its files: a half-removed one is never taken for one."""
    doomed = checkpoint.with_name(f".removing-{checkpoint.name}-{secrets.token_hex(4)}")
    checkpoint.rename(doomed)
    flush(doomed.parent)
    shutil.rmtree(doomed)


def remove_leftovers(root: Path) -> None:
    """Remove what killed writes and removals left behind."""
    for path in root.iterdir():
        if LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
