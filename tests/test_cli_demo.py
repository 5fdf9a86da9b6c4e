"""``branchgrpo demo``: what it writes, prints and checks."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers_cli import assert_one_line_error, branchgrpo

from branchgrpo.cli import demo
from branchgrpo.cli.main import main


def finished(final: float) -> dict[str, Any]:
    """Results of three methods and two seeds, whose judge ends at ``final``; everything else passes."""
    from branchgrpo.training.demo.config import LABELS
    from branchgrpo.training.demo.results import Point, Run, results_document

    runs = [
        Run(
            name, seed, 10, 10, 600, 400, 12.0, (Point(0, 0.0, -1.5, 0.99), Point(1000, 12.0, -0.5 + seed / 100, final))
        )
        for name in LABELS
        for seed in range(2)
    ]
    facts = {"seconds": {"total": 100.0}, "environment": {}}
    return results_document(runs, {name: {"label": LABELS[name]} for name in LABELS}, {}, facts)


@pytest.fixture
def fake_run(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the training by results that are ready; what it was asked for is in ``asked``."""
    from branchgrpo.training.demo import run

    state: dict[str, Any] = {"results": finished(final=0.985)}

    def run_demo(out: Path, **options: Any) -> dict[str, Any]:
        state["asked"] = {"out": out, **options}
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").write_text(json.dumps(state["results"]), encoding="utf-8")
        return state["results"]

    monkeypatch.setattr(run, "run_demo", run_demo)
    return state


def test_options_reach_the_run(fake_run: dict[str, Any], tmp_path: Path):
    assert main(["demo", "--out", str(tmp_path / "o"), "--seeds", "5", "--workers", "3", "--json", "-"]) == 0
    asked = fake_run["asked"]
    assert (asked["out"], asked["seeds"], asked["workers"], asked["quick"]) == (tmp_path / "o", 5, 3, False)
    assert asked["console"].stderr


def test_defaults_are_those_of_the_help(fake_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--json", "result.json"]) == 0
    asked = fake_run["asked"]
    assert (asked["out"], asked["seeds"], asked["workers"], asked["quick"]) == (Path("runs/demo"), 3, None, False)
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8")) == json.loads(
        json.dumps(fake_run["results"])
    )


def test_table_criteria_and_report_are_shown(
    fake_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["demo", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    for label in ("BranchGRPO", "flat GRPO", "G²RPO"):
        (line,) = [line for line in printed.out.splitlines() if line.strip().startswith(label)]
        for cell in ("-1.500", "-0.495", "+1.005 ± 0.007", "99.0%", "98.5%", "1,000", " 12"):
            assert cell in line
    assert printed.err.count("holds  ") == len(fake_run["results"]["acceptance"]["criteria"])
    assert f"report: {tmp_path / 'report.html'}" in printed.err


@pytest.mark.parametrize(("final", "words", "code"), [(0.985, ["--check"], 0), (0.97, ["--check"], 1), (0.97, [], 0)])
def test_check_decides_the_exit_code(
    fake_run: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    final: float,
    words: list[str],
    code: int,
):
    fake_run["results"] = finished(final)
    assert main(["demo", "--out", str(tmp_path), *words]) == code
    assert ("FAILS" in capsys.readouterr().err) == (final < 0.98)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    real = demo.importlib.util.find_spec
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == "sklearn" else real(name))
    assert main(["demo"]) == 2
    assert "the demo needs sklearn: install branchgrpo with its extra [digits]" in capsys.readouterr().err


def test_seeds_and_quick_exclude_each_other():
    assert_one_line_error(branchgrpo("demo", "--quick", "--seeds", "2"), "not allowed with argument")


def test_an_output_that_is_a_file(tmp_path: Path):
    (tmp_path / "taken").write_text("", encoding="utf-8")
    assert_one_line_error(branchgrpo("demo", "--quick", "--out", str(tmp_path / "taken")), "out = ", "a directory")


@pytest.mark.slow
def test_a_quick_run_writes_report_and_results_and_cannot_pass_the_check(tmp_path: Path):
    done = branchgrpo("demo", "--quick", "--check", "--out", "o", "--json", cwd=tmp_path)
    # One seed has no spread, so the criterion on gains cannot hold.
    assert done.returncode == 1
    assert "FAILS  branchgrpo  gain in standard deviations of the seeds: not measured" in done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "o" / "results.json").read_text(encoding="utf-8"))
    assert (tmp_path / "o" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.slow
def test_digits_never_import_diffusers(tmp_path: Path):
    after = "import atexit; atexit.register(lambda: print(sorted({'diffusers', 'transformers'} & set(sys.modules))))"
    done = branchgrpo("demo", "--quick", "--workers", "1", "--out", "o", before=f"import sys; {after}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n")
