"""One error for everything that goes wrong with a checkpoint on disk."""

from pathlib import Path

from branchgrpo.reference.errors import BranchGRPOError


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
