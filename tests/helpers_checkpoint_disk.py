"""Disks that are full or read-only: run inside a mount namespace of its own, ``python FILE KIND FOLDER``.

``unshare`` gives the process mounts that nobody else sees and that end with it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers_checkpoints import all_equal, trained_state_at
from helpers_training_kill import EVERY, Job, config_of, small_digits

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


def refused(job: Job, **hooks: Any) -> str:
    """The message with which a run ends."""
    from branchgrpo.training.engine.loop import Hooks, train

    try:
        train(config_of(job), resume=job.resume, hooks=Hooks(**hooks))
    except CheckpointError as error:
        return str(error)
    return ""


def full_during_a_run(folder: Path) -> dict[str, object]:
    """The disk fills up after a save, when logs are due; then, in the next try, while a checkpoint is written;
    with room again the run ends well."""
    from branchgrpo.training.engine.loop import train

    mount("-t", "tmpfs", "-o", f"size={2 * SIZE}", "tmpfs", str(folder))
    small_digits()
    run = folder / "run"

    def iterated(iteration: int, metrics: Mapping[str, float]) -> None:
        if iteration == EVERY - 1:  # just saved; the scores until the next save need more than the rest of a page
            fill(folder, leave=0)

    def stage(name: str) -> None:
        if name == "half-written":
            fill(folder, leave=0)

    found: dict[str, object] = {}
    for moment, hooks in (("log", {"on_iteration": iterated}), ("save", {"on_stage": stage})):
        message = refused(Job(str(run), resume=moment == "save"), **hooks)
        (folder / "ballast").unlink()
        newest = read.newest(run)
        found[moment] = {"message": message, "newest": None if newest is None else read.load(newest).iteration}
    result = train(config_of(Job(str(run), resume=True)), resume=True)
    return {**found, "room again": [result.status, result.iterations, str(result.export)]}


def on_a_disk_of_its_own(kind: str, folder: Path) -> dict:
    """Run the helper inside a mount namespace; without the right to one, skip and say so."""
    unshare = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*unshare, sys.executable, __file__, kind, str(folder)],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("no `unshare` here: the full and read-only disks are simulated in the other tests alone")
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("no right to mount here: the full and read-only disks are simulated in the other tests alone")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mountable() -> bool:
    """Answer quickly whether this process could mount at all."""
    return subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False, capture_output=True).returncode == 0


KINDS = {"full": full, "read-only": read_only, "full-run": full_during_a_run}

if __name__ == "__main__":
    kind, place = sys.argv[1], Path(sys.argv[2])
    if not mountable():
        sys.exit(77)
    print(json.dumps(KINDS[kind](place)))
