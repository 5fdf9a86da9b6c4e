"""kill -9, at any moment: a resume loses at most what came after the last checkpoint, and then equals the uninterrupted
run, bit for bit."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_checkpoint_disk import on_a_disk_of_its_own
from helpers_checkpoints import all_equal
from helpers_training_kill import EVERY, ITERATIONS, SHORT, Ended, ForkServer, Job, config_of, moments
from safetensors.torch import load_file, save_file

from branchgrpo.models.lora import WEIGHTS as ADAPTER
from branchgrpo.training.checkpoint import layout, read, write
from branchgrpo.training.checkpoint.export import load_digits
from branchgrpo.training.checkpoint.state import TrainState
from branchgrpo.training.config.method import build_method

pytestmark = pytest.mark.slow

MOMENTS = moments(20, seed=9)
FINAL = ["step-000018", "step-000021"]
PATIENCE_S = 30.0
"""Within which every rank ends after one was killed."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(tmp_path_factory.mktemp("server")) as server:
        yield server


def uninterrupted(server: ForkServer, folder: Path, **job: Any) -> tuple[Path, Ended]:
    ended = server(Job(str(folder), **job))
    assert ended.codes == [0] * len(ended.codes), server.log.read_text()
    assert ended.done == ITERATIONS
    return folder, ended


@pytest.fixture(scope="module")
def whole(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    return uninterrupted(server, tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def whole_of_two(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    return uninterrupted(server, tmp_path_factory.mktemp("two") / "run", ranks=2)


@pytest.fixture(scope="module")
def whole_sharded(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    return uninterrupted(server, tmp_path_factory.mktemp("sharded") / "run", ranks=2, parallel="fsdp2")


def newest(folder: Path) -> int:
    """Iteration of the newest checkpoint, 0 for none; every checkpoint that has its name is whole."""
    for path in layout.steps(folder):
        read.verify(path)
    path = read.newest(folder)
    return 0 if path is None else read.load(path).iteration


def newest_after(folder: Path, ended: Ended) -> int:
    """The newest checkpoint of a killed run: nothing is lost but what came after the last one that was due."""
    checkpoint = newest(folder)
    assert ended.done // EVERY * EVERY <= checkpoint <= ended.done + 1
    return checkpoint


def records(folder: Path) -> list[dict]:
    """The log's lines about the run itself, without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    said = [line for line in lines if line["kind"] not in ("start", "end")]
    return [{key: value for key, value in line.items() if key not in ("time", "seconds")} for line in said]


def starts(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["iteration"] for line in lines if line["kind"] == "start"]


def facts(state: TrainState) -> dict[str, Any]:
    names = ("iteration", "seed", "optimizer_steps", "config_hash", "sampler", "derived", "baselines")
    scalars = {"scalars": state.optimizer.scalars, "groups": state.optimizer.groups}
    return {name: getattr(state, name) for name in names} | scalars


def differences(found: Path, wanted: Path, final: Sequence[str] = FINAL) -> list[str]:
    """What tells two finished runs apart; empty if nothing does."""
    a, b = (read.load(folder / "checkpoints" / final[-1]) for folder in (found, wanted))
    tensors = {
        "weights": (a.weights, b.weights),
        "optimizer": (a.optimizer.tensors, b.optimizer.tensors),
        "ema": (a.ema or {}, b.ema or {}),
    }
    differ = [name for name, (left, right) in tensors.items() if not all_equal(left, right)]
    differ += [] if facts(a) == facts(b) else ["facts"]
    differ += [] if records(found) == records(wanted) else ["metrics"]
    same_scores = (found / "scores.jsonl").read_bytes() == (wanted / "scores.jsonl").read_bytes()
    differ += [] if same_scores else ["scores"]
    return differ + ([] if [p.name for p in layout.steps(found)] == list(final) else ["checkpoints"])


def litter(folder: Path) -> list[str]:
    return [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]


def resumed(server: ForkServer, folder: Path, checkpoint: int, **job: Any) -> None:
    """Go on to the end, and see that it went on from there."""
    ended = server(Job(str(folder), resume=True, **job))
    assert ended.codes == [0] * len(ended.codes), server.log.read_text()
    assert starts(folder)[-1] == checkpoint
    assert litter(folder) == []


def test_the_run_has_all_that_must_survive(whole: tuple[Path, Ended], server: ForkServer, tmp_path: Path) -> None:
    """Window, average, accumulation, schedule, baselines are at work; and a second run is the same, bit for bit."""
    folder, _ = whole
    config = config_of(Job(str(folder)))
    assert ITERATIONS >= 20
    assert config.update.accumulation > 1
    method = build_method(config.method)
    windows = {method.plan_at(i).stochastic_steps for i in range(ITERATIONS)}
    assert len(windows) >= 3
    state = read.load(folder / "checkpoints" / FINAL[-1])
    assert state.ema is not None
    assert not all_equal(state.ema, state.weights)
    assert state.baselines
    assert len({record["metrics"]["learning_rate"] for record in records(folder) if "prompts" not in record}) > 10
    assert [record["iteration"] for record in records(folder) if record["kind"] == "evaluation"] == [0, 6, 12, 18, 21]
    again, _ = uninterrupted(server, tmp_path / "run")
    assert differences(again, folder) == []


@pytest.mark.parametrize("number", range(len(MOMENTS)))
def test_killed_at_a_random_moment(number: int, whole: tuple[Path, Ended], server: ForkServer, tmp_path: Path) -> None:
    """Every fifth run is killed a second time while it makes up for what was lost."""
    wanted, timed = whole
    folder, (iteration, part) = tmp_path / "run", MOMENTS[number]
    ended = server(Job(str(folder), iteration=iteration, part=part, wait_s=part * timed.ready_s))
    for again in (False, True):
        assert ended.codes == [-9]
        checkpoint = newest_after(folder, ended)
        if again or number % 5:
            break
        ended = server(Job(str(folder), resume=True, iteration=checkpoint, part=part))
    resumed(server, folder, checkpoint)
    assert differences(folder, wanted) == []


@pytest.mark.parametrize("stage", write.STAGES)
def test_killed_at_a_stage_of_a_save(stage: str, whole: tuple[Path, Ended], server: ForkServer, tmp_path: Path) -> None:
    """The third save: the second one's checkpoint is the newest until the third has its name."""
    folder = tmp_path / "run"
    ended = server(Job(str(folder), stage=stage, save=3))
    assert ended.codes == [-9]
    assert ended.done == 3 * EVERY - 1  # the iteration itself was done, but for its save
    checkpoint = 3 * EVERY if stage == "before-retention" else 2 * EVERY
    assert newest(folder) == checkpoint
    assert len(litter(folder)) == (stage != "before-retention")
    resumed(server, folder, checkpoint)
    assert differences(folder, whole[0]) == []


def test_killed_before_anything_was_saved(whole: tuple[Path, Ended], server: ForkServer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert server(Job(str(folder), stage="before-rename", save=1)).codes == [-9]
    assert newest(folder) == 0
    resumed(server, folder, 0)
    assert differences(folder, whole[0]) == []


# ---- several ranks ---------------------------------------------------------------------------------------------------


def ended_together(ended: Ended, killed: int) -> None:
    assert ended.codes[killed] == -9
    assert ended.codes[1 - killed] not in (0, -9), "the other rank ends by itself, and not as if all were well"
    assert ended.after_kill_s < PATIENCE_S


def test_one_rank_of_two_is_killed(whole_of_two: tuple[Path, Ended], server: ForkServer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = server(Job(str(folder), ranks=2, rank=1, iteration=7, part=0.37))
    ended_together(ended, 1)
    resumed(server, folder, newest_after(folder, ended), ranks=2)
    assert differences(folder, whole_of_two[0]) == []


def test_the_rank_that_writes_is_killed(whole_of_two: tuple[Path, Ended], server: ForkServer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = server(Job(str(folder), ranks=2, rank=0, stage="before-fsync", save=5))
    ended_together(ended, 0)
    assert newest(folder) == 4 * EVERY
    resumed(server, folder, 4 * EVERY, ranks=2)
    assert differences(folder, whole_of_two[0]) == []


def test_a_sharded_run_resumes_on_as_many_ranks_and_on_one(
    whole: tuple[Path, Ended], whole_sharded: tuple[Path, Ended], server: ForkServer, tmp_path: Path
) -> None:
    """The checkpoint holds whole tensors: on two ranks it goes on bit for bit, on one to rounding."""
    folder, alone = tmp_path / "run", tmp_path / "alone"
    ended = server(Job(str(folder), ranks=2, rank=1, parallel="fsdp2", iteration=13, part=0.6))
    ended_together(ended, 1)
    checkpoint = newest_after(folder, ended)
    shutil.copytree(folder, alone)
    resumed(server, folder, checkpoint, ranks=2, parallel="fsdp2")
    assert differences(folder, whole_sharded[0]) == []
    resumed(server, alone, checkpoint)
    single = read.load(whole[0] / "checkpoints" / FINAL[-1])
    state = read.load(alone / "checkpoints" / FINAL[-1])
    assert (state.world_size, read.load(whole_sharded[0] / "checkpoints" / FINAL[-1]).world_size) == (1, 2)
    for name, weight in single.weights.items():
        torch.testing.assert_close(state.weights[name], weight, rtol=0.0, atol=1e-4, msg=name)


@pytest.mark.parametrize("parallel", ["auto", "fsdp2"])
def test_a_run_of_one_process_goes_on_on_two(
    parallel: str, whole: tuple[Path, Ended], server: ForkServer, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    shutil.rmtree(folder / "checkpoints" / FINAL[-1])
    resumed(server, folder, 18, ranks=2, parallel=parallel)
    state, wanted = (read.load(place / "checkpoints" / FINAL[-1]) for place in (folder, whole[0]))
    assert state.world_size == 2
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(state.weights[name], weight, rtol=0.0, atol=1e-5, msg=name)


def test_a_sharded_adapter_survives_and_is_exported(server: ForkServer, tmp_path: Path) -> None:
    """A tiny FLUX on two ranks: the checkpoint holds what is trained, and the export is what the pipeline reads."""
    final = ["step-000002", "step-000004"]
    wanted, folder = tmp_path / "whole", tmp_path / "run"
    job = {"ranks": 2, "parallel": "fsdp2", "adapter": True}
    ended = server(Job(str(wanted), **job))
    assert (ended.codes, ended.done) == ([0, 0], SHORT), server.log.read_text()
    ended_together(server(Job(str(folder), stage="before-retention", save=1, **job)), 0)
    assert newest(folder) == 2
    resumed(server, folder, 2, **job)
    assert differences(folder, wanted, final) == []
    state = read.load(folder / "checkpoints" / final[-1])
    assert state.ema is not None
    assert all("lora_" in name for name in state.weights)
    exported = load_file(folder / "export" / ADAPTER)
    plain = {name.replace(".default.", "."): mean for name, mean in state.ema.items()}
    assert all_equal(exported, plain)


# ---- a full disk, and the export -------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_during_a_run_costs_what_came_after_the_last_checkpoint(tmp_path: Path) -> None:
    found = on_a_disk_of_its_own("full-run", tmp_path)
    for moment, iteration in (("log", 3), ("save", 3)):
        assert "No space left on device" in found[moment]["message"]
        assert str(tmp_path / "run") in found[moment]["message"]
        assert f"step-{iteration:06d}" in found[moment]["message"]
        assert found[moment]["newest"] == iteration
    assert found["room again"] == ["finished", ITERATIONS, str(tmp_path / "run" / "export")]


def test_the_average_is_exported_from_whole_and_from_sharded_weights(
    whole: tuple[Path, Ended], whole_sharded: tuple[Path, Ended]
) -> None:
    for folder, _ in (whole, whole_sharded):
        state = read.load(folder / "checkpoints" / FINAL[-1])
        assert state.ema is not None
        assert all_equal(load_digits(folder / "export").state_dict(), state.ema)


# ---- the comparison itself can fail ----------------------------------------------------------------------------------


def tampered(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change a file of the newest checkpoint behind the manifest's back, manifest included."""
    path = read.newest(folder)
    assert path is not None
    tensors = {key: value.clone() for key, value in load_file(path / name).items()}
    change(tensors)
    save_file(tensors, path / name)
    content = json.loads((path / layout.MANIFEST).read_text())
    content["files"][name] = {"bytes": (path / name).stat().st_size, "sha256": layout.sha256(path / name)}
    (path / layout.MANIFEST).write_text(json.dumps(content))


def entry(tensors: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    return next(value for key, value in sorted(tensors.items()) if key.startswith(prefix) and value.abs().sum() > 0)


LOST: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], None]]] = {
    "weights": (layout.WEIGHTS, lambda t: entry(t, "").mul_(1 + 1e-6)),
    "moment": (layout.OPTIMIZER, lambda t: entry(t, "exp_avg/").zero_()),
    "counter": (layout.OPTIMIZER, lambda t: entry(t, "step/").add_(1)),
    "ema": (layout.EMA, lambda t: entry(t, "").mul_(1 + 1e-5)),
}


@pytest.mark.parametrize("kind", LOST)
def test_a_state_that_lost_something_is_noticed(
    kind: str, whole: tuple[Path, Ended], server: ForkServer, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    shutil.rmtree(folder / "checkpoints" / FINAL[-1])
    os.truncate(folder / "metrics.jsonl", (folder / "metrics.jsonl").stat().st_size - 100)
    tampered(folder, *LOST[kind])
    resumed(server, folder, 18)
    assert {"weights", "optimizer", "ema"} & set(differences(folder, whole[0]))
