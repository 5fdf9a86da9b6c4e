"""Real audits: what a run's backbone may be, mutants judged again, an interrupt and what follows it."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import branchgrpo.conformance.mutants.matrix as matrix
from branchgrpo.conformance.adapters.optimized import OptimizedImplementation
from branchgrpo.conformance.audit.context import Context
from branchgrpo.conformance.audit.kills import kill_matrix_data
from branchgrpo.conformance.audit.run_plan import run_of_the_plan
from branchgrpo.conformance.audit.setting import Setting, read_setting
from branchgrpo.conformance.checks.base import Subject
from branchgrpo.models.tiny.folders import tiny_pipeline
from branchgrpo.reference.errors import InputError
from branchgrpo.training.audit_gate import identity_of
from branchgrpo.training.config.reading import read_config

AUDIT = "import sys; from branchgrpo.cli.main import main; sys.exit(main(['audit', *sys.argv[1:]]))"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def judged(setting: Setting) -> dict:
    """The stage that rolls a run out and drives its first update."""
    data = run_of_the_plan(Context(Subject(OptimizedImplementation()), setting, {}))
    assert not [reason for reason in data["reasons"] if reason["grade"] == "reject"], data["reasons"]
    passed = {row["clause"] for row in data["results"] if row["status"] == "passed"}
    assert passed >= {"KERN-5", "FUSE-2", "NORM-1", "OBJ-1", "OBJ-4"}
    return data


@pytest.mark.slow
def test_the_digits_as_backbone(tmp_path: Path) -> None:
    text = '[audit]\npreset = "branchgrpo-late"\nbackbone = "digits"\nprompts = 1\n'
    data = judged(read_setting(write(tmp_path, text)))
    assert data["states"] == [[1, 1, 1, 8, 8]]
    assert data["drift"] <= data["clip"] / 1000


def pipeline(folder: Path, dtype: str, noise: str) -> Setting:
    text = (
        f'[audit]\npreset = "branchgrpo-late"\nbackbone = "{tiny_pipeline("tiny-flux")}"\nprompts = 1\n'
        f'latent = [4, 8, 12]\ndtype = "{dtype}"\nstorage_dtype = "bfloat16"\nnoise = "{noise}"\n'
    )
    return read_setting(write(folder, text))


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["keyed", "fast"])
def test_a_pipelines_folder_as_backbone(tmp_path: Path, noise: str) -> None:
    setting = pipeline(tmp_path, "float32", noise)
    assert judged(setting)["states"] == [[1, 1, 4, 8, 12]]
    assert setting.identity.data()["noise"] == noise


@pytest.mark.slow
def test_states_computed_in_bfloat16_are_rejected_for_their_ratios(tmp_path: Path) -> None:
    setting = pipeline(tmp_path, "bfloat16", "keyed")
    assert setting.identity.data()["model_dtype"] == "bfloat16"
    data = run_of_the_plan(Context(Subject(OptimizedImplementation()), setting, {}))
    assert data["drift"] > data["clip"]
    assert "OBJ-1" in {reason["clause"] for reason in data["reasons"] if reason["grade"] == "reject"}


TRAINING = """
[run]
folder = "{folder}/run"
device = "cpu"
[method]
preset = "branchgrpo"
settings = {{steps = 6, splits = [0, 2]}}
[model]
source = "{source}"
dtype = "bfloat16"
{lora}
[[rewards]]
name = "{reward}"
[data]
prompts_per_iteration = 2
[rollout]
storage_dtype = "bfloat16"
noise = "fast"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "lora", "reward", "shape"),
    [
        ("digits", "", "digits", [1, 8, 8]),
        ("tiny-flux", "", "colour", [4, 8, 12]),
        ("tiny-flux", "lora = {rank = 4, alpha = 4}", "colour", [4, 8, 12]),
        ("tiny-wan", "lora = {rank = 4, alpha = 4}", "colour", [16, 2, 2, 4]),
    ],
)
def test_a_training_configuration_is_audited_as_it_trains(
    tmp_path: Path, source: str, lora: str, reward: str, shape: list[int]
) -> None:
    file = write(tmp_path, TRAINING.format(folder=tmp_path, source=source, lora=lora, reward=reward))
    setting = read_setting(file)
    assert setting.identity.data() == identity_of(read_config(file)).data()
    assert (setting.plan().steps, setting.plan().splits) == (6, (0, 2))
    data = judged(setting)
    assert data["states"][0][2:] == shape
    # The network's arithmetic is the run's: what update and rollout make of one state in bfloat16 is the same number.
    assert data["drift"] <= data["clip"] / 100
    assert not (tmp_path / "run").exists()


def test_a_configuration_of_neither_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="or the configuration of a training run"):
        read_setting(write(tmp_path, "[tool]\nx = 1\n"))


def test_an_audits_own_table_wins_over_the_runs(tmp_path: Path) -> None:
    setting = read_setting(write(tmp_path, '[method]\npreset = "g2rpo"\n[audit]\npreset = "branchgrpo-late"\n'))
    assert setting.run is None
    assert setting.method.name == "branchgrpo-late"


@pytest.mark.slow
def test_mutants_are_judged_again_where_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["noise_at_deterministic_steps", "prompts_pooled"]
    monkeypatch.setattr(matrix, "kill_matrix", partial(matrix.kill_matrix, names))
    setting = read_setting(write(tmp_path, "[audit]\nprompts = 1\nlatent = [2, 4]\n"))
    data = kill_matrix_data(Context(Subject(OptimizedImplementation()), setting, {}, rerun_mutants=True))
    assert data["rerun"]
    assert list(data["mutants"]) == names
    assert data["living"] == []
    assert all(row["killed_by"] for row in data["mutants"].values())
    # Two mutants keep few of the checks busy, and that is said.
    assert data["idle"]
    assert data["reasons"][0]["grade"] == "condition"


def start(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", AUDIT, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.slow
def test_an_audit_that_is_interrupted_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out, limit = tmp_path / "audit", time.monotonic() + 600
    first = start(out)
    while not (out / "stages" / "clauses.json").exists():
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < limit
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=300)
    assert first.returncode == 130, errors
    assert errors.splitlines()[-1] == "branchgrpo: error: interrupted"
    assert not (out / "audit.json").exists()
    done = {path.name: path.stat().st_mtime_ns for path in (out / "stages").iterdir()}
    assert "mutants.json" not in done
    second = start(out)
    _, errors = second.communicate(timeout=900)
    assert second.returncode == 0, errors
    assert json.loads((out / "audit.json").read_text())["verdict"]["decision"].startswith("adopt")
    after = {path.name: path.stat().st_mtime_ns for path in (out / "stages").iterdir()}
    assert {name: after[name] for name in done} == done
    assert set(after) > set(done)
