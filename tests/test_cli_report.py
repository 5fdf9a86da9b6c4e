"""``branchgrpo report``: one file of a run, whatever state it is in."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_cli import assert_one_line_error, branchgrpo

from branchgrpo.cli.main import main
from branchgrpo.reference.errors import InputError
from branchgrpo.training.config.reading import write_config
from branchgrpo.training.config.schema import Limit, MonitorsConfig, RunConfig, TrainConfig
from branchgrpo.training.logs.grids import save_grid
from branchgrpo.training.logs.jsonl import JsonLines
from branchgrpo.training.logs.report import curves
from branchgrpo.training.logs.report.history import read_history
from branchgrpo.training.logs.report.page import make_report
from branchgrpo.training.logs.report.samples import chosen, inside, sheets_of
from branchgrpo.training.logs.report.summary import summarise
from branchgrpo.training.monitors.limits import judge

EVIL = '<script>alert("x")</script> a $cat_1 & a \\frac{dog}'
NAN = float("nan")


class Page(HTMLParser):
    """What a browser would load from elsewhere or run, and whether every element is closed."""

    VOID = ("meta", "img", "br", "link", "input", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.foreign: list[str] = []
        self.scripts = 0
        self.images: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.scripts += tag == "script"
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith(("data:", "#")):
                self.foreign.append(str(value))
            if tag == "img" and name == "src":
                self.images.append(str(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


class Writer:
    """Writes a run's folder line by line."""

    def __init__(self, folder: Path, iterations: int = 12, **monitors: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.config = TrainConfig(
            run=RunConfig(folder=str(folder), iterations=iterations), monitors=MonitorsConfig(**monitors)
        )
        write_config(self.config, folder / "config.toml")
        self.log = JsonLines(folder)

    def findings(self, metrics: dict[str, float]) -> list[dict[str, Any]]:
        return [finding.as_dict() for finding in judge(metrics, self.config.monitors)]

    def start(self, iteration: int = 0) -> None:
        versions = {"branchgrpo": "0.1.0", "torch": "2.13.0"}
        machine = {"device": "cpu", "processes": 1, "cores": 2, "system": EVIL}
        self.log.write(
            {"kind": "start", "iteration": iteration, "time": 1.0e9, "machine": machine, "versions": versions}
        )

    def iteration(self, i: int, **more: float) -> None:
        metrics = {
            "reward/hps/mean": 0.1 * i, "reward/hps/std": 0.2, "log_prob_drift": 1e-7, "kl": 0.01 * i,
            "advantage_spread/depth_01": 0.7, "advantage_spread/depth_04": 0.9, "value_spread/depth_01": 0.1,
        } | more  # fmt: skip
        seconds = {"rollout": 1.0, "reward": 0.5, "tail": 0.02, "update": 2.0, "other": 0.01}
        self.log.write(
            {"kind": "iteration", "iteration": i, "time": 1.0e9 + i, "metrics": metrics, "seconds": seconds,
             "findings": self.findings(metrics)}
        )  # fmt: skip

    def evaluation(self, i: int, hps: tuple[float, ...], judged: float, grid: bool = True) -> None:
        mean = sum(hps) / len(hps)
        metrics = {"evaluation/hps/mean": mean, "evaluation/hps/stderr": 0.1, "evaluation/judge/mean": judged}
        rows = [{"id": n, "text": EVIL, "rewards": {"hps": value, "judge": judged}} for n, value in enumerate(hps)]
        path = None
        if grid:
            picture = torch.full((1, 8, 8, 3), 17 * i % 256, dtype=torch.uint8)
            path = save_grid([[picture]] * len(hps), rows, self.folder / "grids", i)
        self.log.write(
            {"kind": "evaluation", "iteration": i, "time": 1.0e9 + i, "metrics": metrics, "held_out": ["judge"],
             "trained": {"hps": 1.0}, "prompts": rows, "weights": "trained", "seconds": 0.5, "findings": [],
             "grid": None if path is None else str(path.relative_to(self.folder))}
        )  # fmt: skip

    def end(self, i: int, reason: str, text: str = "") -> None:
        self.log.write({"kind": "end", "iteration": i, "time": 1.0e9 + 99, "reason": reason, "text": text})
        self.log.close()


def run_of(folder: Path) -> Path:
    """A run that finished: twelve iterations, resumed at 6, evaluated at 0, 6 and 12."""
    writer = Writer(folder)
    writer.start()
    writer.evaluation(0, (0.0, 0.2), 0.9)
    for i in range(12):
        if i == 6:
            writer.evaluation(6, (0.5, 0.8), 0.9)
            writer.start(6)
        writer.iteration(i)
    writer.evaluation(12, (1.0, 1.3), 0.9)
    writer.end(12, "finished")
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its report, as the command wrote it."""
    folder = run_of(tmp_path_factory.mktemp("finished") / "run")
    assert main(["report", str(folder)]) == 0
    return folder


def test_one_file_that_needs_nothing_else_and_runs_nothing(finished: Path) -> None:
    text = (finished / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert (page.foreign, page.scripts) == ([], 0)
    assert len(page.images) == 3
    assert all(image.startswith("data:image/png;base64,") for image in page.images)
    assert "<script" not in text
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt; a $cat_1 &amp; a \\frac{dog}" in text
    assert not re.search(r"url\((?!#)", text)


def test_what_it_says_is_what_the_log_says(finished: Path) -> None:
    text = (finished / "report.html").read_text(encoding="utf-8")
    summary = summarise(read_history(finished))
    assert (summary.status, summary.grade, summary.done, summary.planned) == ("finished", "good", 12, 12)
    hps, judge_ = summary.changes
    assert (hps.name, hps.held_out, hps.direction) == ("hps", False, "up")
    assert (hps.first, hps.last) == (pytest.approx(0.1), pytest.approx(1.15))
    assert hps.rise == pytest.approx(1.05)
    assert hps.error == pytest.approx(0.05), "of the prompts' differences, 1.0 and 1.1"
    assert (judge_.held_out, judge_.direction, judge_.rise) == (True, "level", 0.0)
    assert summary.seconds == pytest.approx(
        {"rollout": 12.0, "reward": 6.0, "tail": 0.24, "update": 24.0, "other": 0.12, "evaluation": 1.5}
    )
    assert summary.loop_share == pytest.approx(0.36 / 42.36)
    for words in ("12 of 12 iterations", "resumed at 6", "No monitor went beyond a limit", "held out", "0.8 %"):
        assert words in re.sub(r"\s+", " ", text), words
    assert "preset = &#34;branchgrpo&#34;" in text
    assert text.count("<svg") >= 5


def test_the_same_log_gives_the_same_page(finished: Path) -> None:
    assert make_report(finished)[0] == (finished / "report.html").read_text(encoding="utf-8")


def test_a_monitor_that_stopped_the_run(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", kl=Limit(warn=0.02, stop=0.06))
    writer.start()
    for i in range(8):
        writer.iteration(i)
    writer.end(8, "stopped", "kl at iteration 7 = 0.07: must be not above 0.06 (monitors.kl.stop).")
    text, summary = make_report(tmp_path / "run")
    (kl,) = summary.warned
    assert (summary.status, summary.grade) == ("stopped", "bad")
    assert (kl.key, kl.level, kl.iterations) == ("kl", "stop", (3, 4, 5, 6, 7))
    assert "monitors.kl.stop" in text
    assert "Raise objective.kl" in text
    assert "spoke" in text


def test_numbers_that_are_not_finite_are_gaps_and_findings(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run")
    writer.start()
    for i in range(5):
        writer.iteration(i, gradient_norm=NAN if i == 3 else 1.0, **{"reward/hps/mean": NAN if i == 3 else 0.1})
    writer.end(5, "stopped", "gradient_norm at iteration 3 = nan: must be finite.")
    text, summary = make_report(tmp_path / "run")
    assert [w.key for w in summary.warned] == ["gradient_norm"]
    Page(text)
    history = read_history(tmp_path / "run")
    values = history.curve("gradient_norm")[1].tolist()
    assert values[:3] == [1.0] * 3
    assert values[3] != values[3]
    json.dumps(summary.as_dict(), allow_nan=False)


def test_a_run_that_is_going_on_or_was_killed_within_a_line(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", iterations=100)
    writer.start()
    writer.evaluation(0, (0.1, 0.2), 0.9, grid=False)
    writer.iteration(0)
    writer.log.file.write(b'{"kind": "iteration", "iter')
    writer.log.close()
    text, summary = make_report(tmp_path / "run")
    assert (summary.status, summary.done, summary.planned, summary.grade) == ("open", 1, 100, "warn")
    assert "running or cut off" in text
    assert "No sample grid was saved" in text


@pytest.mark.parametrize("lines", [[], ["start"], ["start", "end"]])
def test_a_run_with_nothing_in_it_yet(tmp_path: Path, lines: list[str]) -> None:
    writer = Writer(tmp_path / "run")
    if "start" in lines:
        writer.start()
    if "end" in lines:
        writer.end(0, "failed", EVIL)
    text, summary = make_report(tmp_path / "run")
    assert summary.done == 0
    assert Page(text).open == []
    assert "Nothing has been trained or evaluated yet" in text
    assert summary.grade == ("bad" if "end" in lines else "warn")


def test_a_reward_that_is_hacked_is_no_success(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run")
    writer.start()
    for i, (hps, judged) in enumerate([((0.0, 0.1), 0.9), ((1.0, 1.12), 0.4)]):
        writer.evaluation(12 * i, hps, judged)
        if i == 0:
            for n in range(12):
                writer.iteration(n)
    writer.end(12, "finished")
    summary = summarise(read_history(tmp_path / "run"))
    assert [c.direction for c in summary.changes] == ["up", "down"]
    assert summary.grade == "warn"


def test_long_runs_are_thinned_and_short_peaks_stay(tmp_path: Path) -> None:
    import numpy as np

    at = np.arange(100_000.0)
    values = np.zeros(100_000)
    values[777] = 5.0
    curve = curves.thin(at, values)
    assert len(curve.at) == 400
    assert curve.high.max() == 5.0
    assert curve.mean.sum() * 250 == pytest.approx(5.0)
    values[5000] = NAN
    assert np.isnan(curves.thin(at, values).mean).sum() == 1
    assert curves.smooth(np.array([1.0, NAN, 3.0, 5.0]), 2).tolist() == [1.0, 1.0, 3.0, 4.0]
    assert np.isnan(curves.smooth(np.array([NAN, 1.0]), 1)[0])


def test_grids_are_few_and_of_the_run_alone(tmp_path: Path) -> None:
    assert chosen(4) == [0, 1, 2, 3]
    assert chosen(100) == [0, 20, 40, 59, 79, 99]
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(b"x")
    assert inside(folder, "../secret.png") is None
    assert inside(folder, "missing.png") is None
    (folder / "own.png").write_bytes(b"x")
    assert inside(folder, "own.png") is not None


@pytest.mark.parametrize("ending", [".png", ".json"])
def test_a_damaged_grid_is_left_out(ending: str, tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run")
    whole = sheets_of(read_history(folder))
    damaged = sorted((folder / "grids").glob(f"*{ending}"))[-1]
    damaged.write_bytes(b"{cut")
    left = sheets_of(read_history(folder))
    assert len(whole) > 1
    assert [sheet.iteration for sheet in left] == [sheet.iteration for sheet in whole[:-1]]
    make_report(folder)


def test_videos_move_in_the_report(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run")
    writer.start()
    writer.evaluation(0, (0.1,), 0.9)
    clip = torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    save_grid([[clip]], [], tmp_path / "run" / "grids", 0)
    page = Page(make_report(tmp_path / "run")[0])
    assert [image[:15] for image in page.images] == ["data:image/gif;"]


def test_large_grids_travel_smaller(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run")
    writer.start()
    writer.evaluation(0, (0.1,), 0.9)
    coarse = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(coarse, (256, 256), mode="bicubic").clamp(0.0, 1.0)
    photo = (smooth * 255).to(torch.uint8).permute(0, 2, 3, 1)
    path = save_grid([list(photo.unsqueeze(1)[i : i + 8]) for i in (0, 8)], [], tmp_path / "run" / "grids", 0)
    assert path is not None
    text, _ = make_report(tmp_path / "run")
    (image,) = Page(text).images
    assert image.startswith("data:image/jpeg;base64,")
    assert len(image) < path.stat().st_size / 2


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page without its pictures."""
    from branchgrpo.training.logs.report import page

    nothing = {"rewards": None, "panels": [], "findings": None, "maps": [], "phases": None, "sheets": []}
    monkeypatch.setattr(page, "pictures_of", lambda history, summary: nothing)


@pytest.mark.usefixtures("quick")
def test_table_json_and_other_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_of(tmp_path / "run")
    assert main(["report", str(folder), "--output", str(tmp_path / "here.html")]) == 0
    printed = capsys.readouterr().out
    assert "finished, 12 of 12 iterations" in printed
    assert "+1.05 ± 0.05" in printed
    assert (tmp_path / "here.html").exists()
    assert not (folder / "report.html").exists()
    assert main(["report", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["grade"], found["done"]) == ("finished", "good", 12)
    assert found["changes"][0]["direction"] == "up"
    assert found["report"] == str(folder / "report.html")


@pytest.mark.usefixtures("quick")
def test_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "the folder of a run, with a metrics.jsonl in it" in printed.err
    (tmp_path / "metrics.jsonl").write_text("no JSON\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 1"):
        make_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "config.toml").write_text("a = = b", encoding="utf-8")
    with pytest.raises(InputError, match="must be TOML"):
        make_report(tmp_path)


@pytest.mark.usefixtures("quick")
def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_of(tmp_path / "run")
    assert main(["report", str(folder), "--output", str(tmp_path / "missing" / "r.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install() -> None:
    before = "import importlib.util; importlib.util.find_spec = lambda name, package=None: None"
    assert_one_line_error(branchgrpo("report", "anywhere", before=before), "matplotlib, jinja2, PIL", "[training]")
