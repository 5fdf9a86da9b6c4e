"""``branchgrpo train`` on the command line."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from helpers_cli import TORCH_FREE, assert_one_line_error, branchgrpo

from branchgrpo.cli import train as command
from branchgrpo.cli.main import main
from branchgrpo.cli.train import split_overrides
from branchgrpo.training.config.leaves import leaves
from branchgrpo.training.config.reading import config_from, read_config

QUICK = (
    "run.iterations=2", "method.settings={steps=4, splits=[0, 2]}", "data.prompts_per_iteration=2",
    "data.held_out_prompts=2", "evaluation.every=0", "logging.progress=false",
)  # fmt: skip


def test_help_teaches_at_once_and_without_torch() -> None:
    done = branchgrpo("train", "--help", before=TORCH_FREE)
    assert done.returncode == 0, done.stderr
    for word in ("--resume", "--require-audit", "torchrun", "base =", "branchgrpo@digits", "exit code", "[[rewards]]"):
        assert word in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 120


def test_words_are_told_apart_from_overrides() -> None:
    words = ["--config", "a=b.toml", "run.seed=3", "--resume", "rewards.0.weight=", "--json", "out.json", "x"]
    options, overrides = split_overrides(words)
    assert options == ["--config", "a=b.toml", "--resume", "--json", "out.json", "x"]
    assert overrides == ["run.seed=3", "rewards.0.weight="]


MISTAKES = [
    ((), "nothing to train"),
    (("--prest", "x"), "did you mean '--preset'?"),
    (("--preset", "brnchgrpo"), "'branchgrpo'?"),
    (("--config", "none.toml"), "existing TOML file"),
    (("--preset", "branchgrpo@digits", "run.seeds=3"), "did you mean run.seed?"),
    (("--preset", "branchgrpo@digits", "run.seed=x"), "run.seed = 'x': must be an integer"),
    (("--preset", "branchgrpo@digits", "word"), "unexpected argument 'word'"),
    (("--preset", "branchgrpo@digits", "--checkpoint", "x"), "--checkpoint goes with --resume"),
    (("--preset", "branchgrpo@digits", "--json", "none/x.json"), "cannot write 'none/x.json'"),
    (("--preset", "branchgrpo@digits", "--accept-conditions"), "--accept-conditions goes with --require-audit"),
]


@pytest.mark.parametrize(("words", "text"), MISTAKES, ids=[text for _, text in MISTAKES])
def test_a_mistake_is_answered_in_one_line(words: tuple[str, ...], text: str, capsys: Any) -> None:
    assert main(["train", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("branchgrpo: error: ")
    assert err.count("\n") == 1
    assert text in err


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two': must be an integer ≥ 1"),
        ({"WORLD_SIZE": "2"}, "RANK = None: must be set beside WORLD_SIZE = 2: start through torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR = None: must be set"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK = '2': must be"),
    ],
)
def test_an_environment_without_a_launcher_is_refused(
    environment: dict[str, str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--preset", "branchgrpo@digits", f"run.folder={tmp_path / 'run'}", *QUICK]) == 2
    assert f"branchgrpo: error: {text}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_processes_that_do_not_speak_say_nothing(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["train", "--preset", "brnchgrpo"]) == 2
    assert capsys.readouterr() == ("", "")


def test_the_printed_configuration_is_the_run(capsys: Any) -> None:
    words = ["train", "--preset", "g2rpo@tiny-flux", "--print-config", "run.seed=7", "update.max_grad_norm=inf"]
    wanted = read_config(preset="g2rpo@tiny-flux", overrides=words[-2:])
    assert main(words) == 0
    text = capsys.readouterr().out
    assert config_from(tomllib.loads(text)) == wanted
    assert all(f"{name.rsplit('.', 1)[-1]} = " in text or f".{name.rsplit('.', 1)[-1]}]" in text for name in leaves()
               if not name.startswith("model.lora"))  # fmt: skip
    assert main([*words, "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert tables["update"]["max_grad_norm"] == "inf"
    assert tables["run"]["seed"] == 7


def test_presets_are_listed(capsys: Any) -> None:
    assert main(["train", "--list-presets", "--json"]) == 0
    rows = {row["preset"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["branchgrpo"]["model"] == "black-forest-labs/FLUX.1-dev"
    assert rows["tempflow@tiny-wan"]["model"] == "tiny-wan"
    assert main(["train", "--list-presets"]) == 0
    out = capsys.readouterr().out
    assert "branchgrpo-deppru-5" in out
    assert "NAME@digits" in out


def test_a_run_and_its_resumption(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "run"
    words = ["train", "--preset", "branchgrpo@digits", f"run.folder={folder}", *QUICK, "checkpoint.every=1"]
    assert main([*words, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["status"], row["iterations"], row["folder"]) == ("finished", 2, str(folder))
    assert read_config(folder / "config.toml") == read_config(preset="branchgrpo@digits", overrides=words[3:])
    assert main(words) == 2
    assert "resume goes on" in capsys.readouterr().err
    assert main(["train", "--config", str(folder / "config.toml"), "--resume", "run.iterations=3"]) == 0
    assert "finished after 3 iterations" in capsys.readouterr().out


def test_a_monitor_that_stops_the_run_gives_exit_code_one(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "run"
    stop = "monitors.reward_spread={warn=100.0, stop=99.0}"
    assert main(["train", "--preset", "branchgrpo@digits", f"run.folder={folder}", *QUICK, stop]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "reward_spread" in err
    assert str(folder) in err


@pytest.mark.slow
def test_two_processes_speak_once(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]
    run = ["branchgrpo.cli.main", "train", "--preset", "branchgrpo@digits", f"run.folder={tmp_path / 'run'}", *QUICK]
    done = subprocess.run(
        [*words, *run, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if name == "tomlkit" else object())
    assert main(["train", "--preset", "branchgrpo@digits"]) == 2
    assert "training needs tomlkit: install branchgrpo with its extra [training]" in capsys.readouterr().err


def test_the_command_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert_one_line_error(branchgrpo("train", "--preset", "brnchgrpo", cwd=tmp_path), "'branchgrpo'?")
