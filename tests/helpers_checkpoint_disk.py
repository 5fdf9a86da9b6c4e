"""Disks that are full or read-only: run inside a mount namespace of its own, ``python FILE full|read-only FOLDER``.

``unshare`` gives the process mounts that nobody else sees and that end with it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from helpers_checkpoints import all_equal, trained_state_at

from branchgrpo.training.checkpoint import read, write
from branchgrpo.training.checkpoint.errors import CheckpointError

SIZE = 3 << 20
"""Of the small disk: room for ``write.SLACK`` and some checkpoints."""


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def fill(folder: Path, leave: int) -> None:
    """Take all of a disk's room but ``leave`` bytes."""
    stats = os.statvfs(folder)
    with (folder / "ballast").open("wb") as stream:
        stream.write(b"x" * (stats.f_bavail * stats.f_frsize - leave))


def outcome(run: Path, older: Path, on_stage: write.OnStage | None = None) -> dict[str, object]:
    """What the next save says, and what is left."""
    message = ""
    try:
        write.save(run, trained_state_at(4), 1, on_stage)
    except CheckpointError as error:
        message = str(error)
    newest = read.newest(run)
    return {
        "message": message,
        "names": sorted(path.name for path in older.parent.iterdir()),
        "intact": newest == older and all_equal(read.load(older).weights, trained_state_at(2).weights),
    }


def full(folder: Path) -> dict[str, object]:
    """Once too little room to begin with; once the disk fills up during the write."""
    mount("-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder))
    run = folder / "run"
    older = write.save(run, trained_state_at(2))
    fill(folder, leave=write.SLACK // 2)
    before = outcome(run, older)
    (folder / "ballast").unlink()
    during = outcome(run, older, lambda stage: fill(folder, leave=0) if stage == "half-written" else None)
    (folder / "ballast").unlink()
    after = outcome(run, older)
    return {"before": before, "during": during, "room again": after}


def read_only(folder: Path) -> dict[str, object]:
    run = folder / "run"
    older = write.save(run, trained_state_at(2))
    mount("--bind", str(folder), str(folder))
    mount("-o", "remount,ro,bind", str(folder))
    return {"ro": outcome(run, older)}


def mountable() -> bool:
    """Answer quickly whether this process could mount at all."""
    return subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False, capture_output=True).returncode == 0


if __name__ == "__main__":
    kind, place = sys.argv[1], Path(sys.argv[2])
    if not mountable():
        sys.exit(77)
    print(json.dumps({"full": full, "read-only": read_only}[kind](place)))
