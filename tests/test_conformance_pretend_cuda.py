"""Everything that runs on a GPU runs on a device that only refuses what a GPU refuses: mixes of devices."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DEVICE = str(TESTS / "helpers_pretend_cuda.py")
COMMAND = "branchgrpo.cli.main"
OPTIMIZED = "branchgrpo.conformance.adapters.optimized:OptimizedImplementation"

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None, reason="this build of torch has a CUDA of its own: nothing to pretend"
)


def start(*words: str) -> subprocess.Popen[str]:
    """A Python process: a module after ``-m``, or a script, and arguments; shapes are checked in other tests."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "JAXTYPING_DISABLE": "1"}
    out = subprocess.PIPE
    return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=os.environ | own, stdout=out, stderr=out, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    """What a process printed that must succeed."""
    out, errors = process.communicate()
    assert process.returncode == 0, f"{out[-4000:]}\n{errors[-4000:]}"
    return out


def both(*words: str, more: Sequence[str] = ("--device", "cuda")) -> tuple[Any, Any]:
    """What a command prints as JSON on the device and on the CPU, at the same time."""
    there, here = start(DEVICE, COMMAND, *words, *more), start("-m", COMMAND, *words)
    return json.loads(finished(there)), json.loads(finished(here))


def pytest_on_device(*words: str) -> str:
    """The last line of a run of pytest."""
    return finished(start(DEVICE, "pytest", "-q", "-p", "no:cacheprovider", *words)).strip().splitlines()[-1]


def test_the_pretended_device_refuses_and_allows_what_torch_does() -> None:
    assert " passed in " in pytest_on_device("tests/helpers_pretend_cuda_rules.py")


def test_rollouts_and_updates_on_the_device() -> None:
    assert " passed in " in pytest_on_device("tests/helpers_pretend_cuda_runs.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["optimized", "reference", "plain"])
def test_every_clause_passes_on_the_device_that_passes_on_the_cpu(name: str) -> None:
    there, here = both("conformance", "--impl", name, "--vectors", "--json")
    assert there == here
    assert {clause["status"] for clause in there["clauses"].values()} == {"passed"}


def test_the_device_table_is_filled_and_what_the_device_lacks_has_a_reason() -> None:
    table = json.loads(finished(start(DEVICE, COMMAND, "conformance", "--device", "cuda", "--table", "--json")))
    assert table["device"] == "cuda"
    lacking = {"float32 with TF32": "no TF32 on cuda", "compiled": "nothing was compiled"}
    for row in table["rows"]:
        reason = next((reason for start, reason in lacking.items() if row["variant"].startswith(start)), None)
        assert row["status"] == ("passed" if reason is None else "unsupported"), row
        assert row["detail"].startswith(reason or "")
    assert {row["variant"] for row in table["rows"]} > {"float64", "float32", "bf16 denoiser"}


def test_the_tests_for_a_gpu_that_are_about_placement_pass() -> None:
    chosen = "keyed_rollouts or two_runs"
    assert pytest_on_device("tests/test_optimized_gpu.py", "-k", chosen).startswith("2 passed")
    assert pytest_on_device("tests/test_training_determinism.py", "-m", "gpu").startswith("1 passed")


def trained(folder: Path, preset: str, *words: str) -> None:
    """Two short runs of training, on the device and on the CPU: the same weights, as the same kernels computed them."""
    processes = []
    for device, before in (("cuda", [DEVICE, COMMAND]), ("cpu", ["-m", COMMAND])):
        own = [f"run.folder={folder / device}", f"run.device={device}", "run.iterations=1", *words]
        processes.append(start(*before, "train", "--preset", preset, *own))
    for process in processes:
        assert "finished after 1 iterations" in finished(process)
    there, here = (load_file(next((folder / d / "checkpoints").glob("*/weights.safetensors"))) for d in ("cuda", "cpu"))
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], weight) for name, weight in here.items())


def test_digits_are_trained_on_the_device(tmp_path: Path) -> None:
    trained(tmp_path, "branchgrpo@digits", "rollout.offload=true")


WHOLE = (
    *("method.objective.kl=0.1", "ema.decay=0.5", "monitors.costly_every=1", "evaluation.every=1"),
    *("rollout.noise=fast", "rollout.storage_dtype=bfloat16", "update.inner_epochs=2", "checkpoint.export=true"),
)
"""Whatever else a run can do."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("branchgrpo@tiny-flux", ["rollout.offload=true"]),
        ("g2rpo@tiny-flux", ["model.lora.rank=4", "model.dtype=bfloat16", "model.gradient_checkpointing=true"]),
        ("branchgrpo@tiny-sd3", ["rollout.offload=true", *WHOLE]),
        ("branchgrpo@tiny-qwen-image", []),
        ("tempflow@tiny-wan", []),
    ],
)
def test_tiny_pipelines_are_trained_on_the_device(preset: str, words: list[str], tmp_path: Path) -> None:
    trained(tmp_path, preset, *words)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["network", "digits"])
def test_a_runs_own_plan_is_audited_on_the_device(backbone: str, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(f'[audit]\npreset = "g2rpo"\nbackbone = "{backbone}"\n')
    words = ["audit", "--device", "cuda", "--config", str(tmp_path / "own.toml"), "--out", str(tmp_path / "audit")]
    assert "branchgrpo.optimized: adopt" in finished(start(DEVICE, COMMAND, *words))


@pytest.mark.slow
def test_quick_properties_hold_on_the_device() -> None:
    where = ["properties", "-m", "quick", "--branchgrpo-impl", f"{OPTIMIZED},device=cuda"]
    assert " passed" in pytest_on_device(*where)


@pytest.mark.slow
def test_the_conformance_plugin_judges_on_the_device() -> None:
    suite = ["--pyargs", "branchgrpo.conformance.suite.test_conformance", "--branchgrpo-device", "cuda"]
    assert " passed in " in pytest_on_device(*suite)
