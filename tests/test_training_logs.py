"""The log of a run: JSON lines, progress, TensorBoard, Weights & Biases, sample grids."""

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.reference.protocols import Prompt
from branchgrpo.training.config.schema import LoggingConfig, RunConfig, TrainConfig
from branchgrpo.training.evaluation.evaluate import Evaluation
from branchgrpo.training.logs.grids import GAP, enlarge, save_grid, tiled
from branchgrpo.training.logs.journal import Journal, check_logging, open_journal
from branchgrpo.training.logs.jsonl import JsonLines, line_of, read_lines
from branchgrpo.training.logs.progress import QUIET_S, TrainingProgress, duration
from branchgrpo.training.monitors.baselines import Scored
from branchgrpo.training.monitors.limits import Finding

WARNING = Finding("kl", "kl", "warn", 2.0, 1.0, "KL to the reference (kl) is 2, above 1. Lower the learning rate.")


def test_every_line_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    log = JsonLines(tmp_path)
    for i in range(3):
        log.write({"kind": "iteration", "iteration": i})
        assert [r["iteration"] for r in read_lines(tmp_path / "metrics.jsonl")] == list(range(i + 1))
    assert log.length() == (tmp_path / "metrics.jsonl").stat().st_size
    log.close()
    log.close()


def test_what_json_cannot_hold_is_null_and_named() -> None:
    record = {"metrics": {"kl": math.nan, "loss": 1.0, "list": [math.inf, (-math.inf, 2)]}, "notes": ["resumed"]}
    text = line_of(record).decode()
    found = json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} is no JSON"))
    assert found["metrics"] == {"kl": None, "loss": 1.0, "list": [None, [None, 2]]}
    assert found["notes"] == ["resumed", "metrics/kl is nan", "metrics/list[0] is inf", "metrics/list[1][0] is -inf"]
    assert text.endswith("}\n")
    assert "\n" not in text[:-1]


def test_a_resumed_log_ends_where_the_checkpoint_was(tmp_path: Path) -> None:
    log = JsonLines(tmp_path)
    log.write({"iteration": 0, "text": "schön\n"})
    length = log.length()
    log.write({"iteration": 1})
    log.file.write(b'{"iteration": 2, "half')
    log.close()
    resumed = JsonLines(tmp_path, length)
    resumed.write({"iteration": 1, "again": True})
    resumed.close()
    assert [r["iteration"] for r in read_lines(resumed.path)] == [0, 1]
    JsonLines(tmp_path).close()
    assert resumed.path.read_bytes() == b"", "a run that begins anew begins its log anew"


def test_a_log_that_does_not_fit_the_checkpoint_is_refused_and_stays(tmp_path: Path) -> None:
    log = JsonLines(tmp_path)
    log.write({"iteration": 0})
    size = log.length()
    log.close()
    with pytest.raises(InputError, match=f"must be at least {size + 1} bytes"):
        JsonLines(tmp_path, size + 1)
    with pytest.raises(InputError, match="the end of a line"):
        JsonLines(tmp_path, size - 1)
    assert log.path.stat().st_size == size


def test_reading_while_a_line_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 0}\n{"itera')
    assert list(read_lines(path)) == [{"iteration": 0}]
    for line in (b"{broken}\n", b"[1]\n"):
        path.write_bytes(b'{"iteration": 0}\n' + line)
        with pytest.raises(InputError, match="line 2"):
            list(read_lines(path))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(terminal: bool = False) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=200), stream


def test_without_a_terminal_a_line_now_and_then_with_the_time_left() -> None:
    console, stream = shown()
    clock = Clock()
    progress = TrainingProgress(100, 40, console=console, clock=clock)
    for done in range(41, 101):
        clock.now += 10.0
        progress.iteration(done, {"reward/hps/mean": 0.25, "kl": 1.0})
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == pytest.approx(60 * 10.0 / QUIET_S, abs=1)
    assert lines[0] == "iteration 41/100  9:50 left  hps 0.25"
    assert lines[-1] == "iteration 100/100  0:00 left  hps 0.25"


def test_on_a_terminal_a_bar() -> None:
    console, stream = shown(terminal=True)
    progress = TrainingProgress(4, console=console)
    progress.iteration(2, {"reward/hps/mean": 0.25})
    progress.close()
    assert "2/4" in stream.getvalue()
    assert "hps 0.25" in stream.getvalue()


def test_the_time_left_follows_the_recent_pace() -> None:
    clock = Clock()
    progress = TrainingProgress(200, console=shown()[0], clock=clock)
    assert progress.left() is None
    for done in range(1, 101):
        clock.now += 100.0 if done <= 50 else 1.0
        progress.iteration(done, {})
    assert progress.left() == pytest.approx(100.0)
    assert duration(3723.4) == "1:02:03"


def test_a_finding_is_shown_once_until_it_has_gone() -> None:
    console, stream = shown()
    progress = TrainingProgress(10, console=console)
    markup = replace(WARNING, key="odd", text="[red]not markup[/red]")
    for iteration, found in enumerate([[WARNING], [WARNING, markup], [WARNING], [], [WARNING]]):
        progress.findings(iteration, found)
    progress.findings(4, [WARNING], "evaluation")
    assert stream.getvalue().splitlines() == [
        f"iteration 0: warn: {WARNING.text}",
        "iteration 1: warn: [red]not markup[/red]",
        f"iteration 4: warn: {WARNING.text}",
        f"evaluation 4: warn: {WARNING.text}",
    ]


def picture(shade: int, frames: int = 1, height: int = 64, width: int = 48) -> Tensor:
    return torch.full((frames, height, width, 3), shade, dtype=torch.uint8)


ROWS = [{"id": 3, "text": "a <b>cat</b>", "rewards": {"hps": 0.2}}, {"id": 4, "text": "ein Hund", "rewards": {}}]


def test_a_grid_has_a_prompt_a_row_and_its_prompts_beside_it(tmp_path: Path) -> None:
    from PIL import Image

    pictures = [[picture(10), picture(20)], [picture(30), picture(40)]]
    path = save_grid(pictures, ROWS, tmp_path / "grids", 50)
    assert path == tmp_path / "grids" / "step-000050.png"
    with Image.open(path) as page:
        assert page.size == (2 * (48 + GAP) + GAP, 2 * (64 + GAP) + GAP)
        for row in range(2):
            for column in range(2):
                at = (GAP + column * (48 + GAP), GAP + row * (64 + GAP))
                assert page.getpixel(at) == (10 * (2 * row + column + 1),) * 3
        assert page.getpixel((0, 0)) == (255, 255, 255)
    about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert about == {"iteration": 50, "samples": 2, "video": False, "rows": ROWS}
    assert not path.with_suffix(".gif").exists()


def test_a_video_is_a_strip_of_frames_and_an_animation(tmp_path: Path) -> None:
    from PIL import Image

    clip = torch.cat([picture(0), picture(100), picture(200)])
    path = save_grid([[clip, clip], [clip, clip[:2]]], ROWS, tmp_path, 1)
    assert path is not None
    with Image.open(path) as page:
        assert page.size == (3 * 48 + 2 * GAP, 4 * (64 + GAP) + GAP)
        assert page.getpixel((GAP + 48, GAP)) == (100, 100, 100)
    with Image.open(path.with_suffix(".gif")) as animation:
        assert animation.n_frames == 3
        animation.seek(2)
        last = animation.convert("RGB")
        assert last.getpixel((GAP, GAP))[0] == pytest.approx(200, abs=8)
        assert last.getpixel((GAP + 52, GAP + 68))[0] == pytest.approx(100, abs=8), "the shorter one stays"


def test_small_pictures_are_enlarged_pixel_for_pixel() -> None:
    small = torch.arange(64, dtype=torch.uint8).reshape(1, 8, 8, 1).expand(-1, -1, -1, 3)
    large = enlarge(small)
    assert large.shape == (1, 48, 48, 3)
    assert torch.equal(large[:, ::6, ::6], small)
    assert torch.equal(enlarge(picture(1)), picture(1))
    assert tiled([[picture(1)[0]], [picture(2)[0], picture(3)[0]]]).shape == (2 * 68 + 4, 2 * 52 + 4, 3)


def test_samples_that_are_no_pictures_leave_no_grid(tmp_path: Path) -> None:
    assert save_grid([], ROWS, tmp_path / "grids", 1) is None
    assert not (tmp_path / "grids").exists()


def evaluation() -> Evaluation:
    table = torch.tensor([[[0.1, 0.9], [0.3, 1.0]]], dtype=torch.float64)
    scored = (
        Scored("hps", 1.0, False, (-math.inf, math.inf), 0.2, 0.1),
        Scored("judge", 1.0, True, (0.0, 1.0), 0.95, 0.05),
    )
    return Evaluation((Prompt(1, "a cat"),), scored, table, 0.5, [[picture(10), picture(20)]])


def written(journal: Journal) -> list[dict[str, Any]]:
    return list(read_lines(journal.lines.path))


def play(journal: Journal, first: int = 0) -> None:
    """A start, at the very beginning an evaluation, two iterations, an evaluation, an end."""
    journal.start(first, 2, "cpu", {"config_hash": "abc"})
    found = evaluation()
    if first == 0:
        journal.evaluation(first, found, found.metrics({}), [], 0.5, True)
    for i in (first, first + 1):
        journal.iteration(i, {"reward/hps/mean": 0.1 * i, "kl": math.nan}, {"rollout": 1.0}, [WARNING])
    journal.end(first + 2, "finished")
    journal.close()


def run_config(folder: Path, **logging: Any) -> TrainConfig:
    return TrainConfig(run=RunConfig(folder=str(folder), iterations=8), logging=LoggingConfig(**logging))


def test_a_run_is_written_down_from_start_to_end(tmp_path: Path) -> None:
    console, stream = shown()
    journal = open_journal(run_config(tmp_path), tmp_path, console=console)
    play(journal)
    start, before, first, second, end = written(journal)
    assert [r["kind"] for r in (start, before, first, second, end)] == [
        "start", "evaluation", "iteration", "iteration", "end",
    ]  # fmt: skip
    assert (start["machine"]["processes"], start["config_hash"]) == (2, "abc")
    assert start["versions"]["torch"] == torch.__version__
    assert before["held_out"] == ["judge"]
    assert (before["grid"], before["weights"]) == ("grids/step-000000.png", "ema")
    assert (tmp_path / before["grid"]).exists()
    assert before["prompts"] == [{"id": 1, "text": "a cat", "rewards": {"hps": pytest.approx(0.2), "judge": 0.95}}]
    assert first["metrics"] == {"reward/hps/mean": 0.0, "kl": None}
    assert first["notes"] == ["metrics/kl is nan"]
    assert second["findings"][0]["text"] == WARNING.text
    assert (end["reason"], end["iteration"]) == ("finished", 2)
    assert stream.getvalue().count(WARNING.text) == 1


def test_progress_can_be_switched_off(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    play(open_journal(run_config(tmp_path, progress=False), tmp_path))
    assert capfd.readouterr() == ("", "")


def test_progress_goes_to_standard_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    play(open_journal(run_config(tmp_path), tmp_path))
    printed = capfd.readouterr()
    assert printed.out == ""
    assert WARNING.text in printed.err.replace("\n", " ")


def test_tensorboard_has_numbers_and_pictures_and_a_resumed_run_hides_what_is_cut_off(tmp_path: Path) -> None:
    """By iterations done: what belongs to the checkpoint stays, its evaluation too; what came after it is hidden."""
    pytest.importorskip("tensorboard", reason="the extra [training] brings TensorBoard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = run_config(tmp_path, progress=False, tensorboard=True)
    lost = open_journal(config, tmp_path)
    play(lost)
    early = open_journal(config, tmp_path)  # killed before its first checkpoint: everything anew
    early.iteration(0, {"reward/hps/mean": 0.0}, {})
    found = evaluation()
    early.evaluation(1, found, found.metrics({}), [], 0.5, True)
    early.iteration(1, {"reward/hps/mean": 9.0}, {})
    early.evaluation(2, found, found.metrics({}), [], 0.5, True)
    early.close()
    play(open_journal(config, tmp_path, start=1, length=0), first=1)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = [(event.step, event.value) for event in events.Scalars("reward/hps/mean")]
    assert values == [(1, 0.0), (2, pytest.approx(0.1)), (3, pytest.approx(0.2))]
    assert [event.step for event in events.Images("samples")] == [1]
    assert [event.step for event in events.Scalars("evaluation/judge/mean")] == [1]


@pytest.mark.parametrize(
    ("options", "field"), [({"tensorboard": True}, "tensorboard"), ({"wandb": "offline"}, "wandb")]
)
def test_a_board_that_is_not_installed_is_refused_before_anything_is_written(
    options: dict[str, Any], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=rf"logging\.{field} = .*pip install"):
        check_logging(LoggingConfig(**options))
    with pytest.raises(OptionError):
        open_journal(run_config(tmp_path, **options), tmp_path)
    assert list(tmp_path.iterdir()) == []


class FakeRun:
    def __init__(self, asked: dict[str, Any]) -> None:
        self.id = asked["id"] or "made-up"
        self.asked, self.logged, self.finished = asked, [], False

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """Stands in for the client; the runs that were begun."""
    import importlib.util

    runs: list[FakeRun] = []

    def init(**asked: Any) -> FakeRun:
        runs.append(FakeRun(asked))
        return runs[-1]

    module = ModuleType("wandb")
    module.init, module.Image = init, lambda path: ("image", path)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "wandb" else find(name))
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return runs


def test_wandb_is_told_everything_and_a_resumed_run_keeps_its_id(
    fake_wandb: list[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    config = run_config(tmp_path, progress=False, wandb="offline", wandb_project="trees")
    play(open_journal(config, tmp_path))
    play(open_journal(config, tmp_path, start=1), first=1)
    first, second = fake_wandb
    assert (first.asked["project"], first.asked["mode"], first.asked["id"]) == ("trees", "offline", None)
    assert Path(first.asked["dir"]) == tmp_path
    assert first.asked["config"]["run"]["iterations"] == 8
    assert (second.asked["id"], second.asked["resume"]) == ("made-up", "allow")
    assert (0, {"samples": ("image", str(tmp_path / "grids" / "step-000000.png"))}) in first.logged
    assert [step for step, values in second.logged if "reward/hps/mean" in values] == [2, 3]
    assert first.finished
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        assert Path(os.environ[name]).is_relative_to(tmp_path)
