"""One error for everything that goes wrong with a checkpoint on disk."""

import errno
from pathlib import Path

from branchgrpo.reference.errors import BranchGRPOError
from branchgrpo.training.checkpoint.layout import steps

OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES)
"""What the system says when a disk is full, read-only, broken, or not ours."""


class CheckpointError(BranchGRPOError):
    """A checkpoint that cannot be written, or one that cannot be trusted or does not fit."""


def offer(older: Path | None) -> str:
    """The end of a message: what is left to go on from."""
    return "no intact older checkpoint is left" if older is None else f"an older intact one is {older}"


def not_written(folder: Path, problem: object, legal: str, older: Path | None) -> CheckpointError:
    """The error of a checkpoint that could not be written.

    Args:
        folder: where it was to go.
        problem: what the system says.
        legal: what the folder must be.
        older: the newest checkpoint that is complete, untouched by the failure.
    """
    kept = "no checkpoint was there before" if older is None else f"the newest checkpoint stays {older}"
    return CheckpointError(f"checkpoint folder {folder}", str(problem), f"{legal}; {kept}")


def told_of_disk(run_folder: Path, error: BaseException) -> BaseException:
    """The error that a run ends with: what a disk refused is told with the folder and the checkpoint that is left.

    Args:
        run_folder: of the run.
        error: what happened, such as a log that could not be written.
    """
    if not isinstance(error, OSError) or error.errno not in OF_DISKS:
        return error
    newest = next(reversed(steps(run_folder)), None)
    kept = "no checkpoint was saved" if newest is None else f"the newest checkpoint is {newest}"
    return CheckpointError(f"run folder {run_folder}", str(error), f"writable, on a disk with room; {kept}")
