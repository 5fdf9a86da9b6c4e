"""Every preset at the size of a CPU: on the digits it learns, on tiny pipelines it runs from end to end."""

import math
from pathlib import Path

import pytest
from helpers_optimized import shapes_unchecked
from helpers_training import records

from branchgrpo.training.config.names import methods, twins
from branchgrpo.training.config.reading import read_config
from branchgrpo.training.engine.loop import train

pytestmark = pytest.mark.slow

SEEDS = (0, 1, 2)
TINY = [
    (name, twin)
    for twin in twins()
    for name in (methods() if twin == "tiny-flux" else ["branchgrpo", "g2rpo", "flowgrpo", "mixgrpo"])
    if twin != "digits"
]
QUIET = ("run.device=cpu", "logging.progress=false")


def rise(name: str, seed: int, folder: Path) -> float:
    """By how much the evaluated reward rises: the same prompts and noise before and after."""
    with shapes_unchecked():
        train(read_config(preset=f"{name}@digits", overrides=(f"run.folder={folder}", f"run.seed={seed}", *QUIET)))
    found = [record["metrics"] for record in records(folder, "evaluation")]
    assert found[-1]["evaluation/digits_judge/mean"] > 0.95, "the samples are digits still"
    return float(found[-1]["evaluation/digits/mean"] - found[0]["evaluation/digits/mean"])


@pytest.mark.parametrize("name", methods())
def test_a_twin_on_the_digits_learns(name: str, tmp_path: Path) -> None:
    """Paired over the seeds: the mean rise is more than two standard errors above 0, and every seed rises."""
    rises = [rise(name, seed, tmp_path / str(seed)) for seed in SEEDS]
    mean = math.fsum(rises) / len(rises)
    error = math.sqrt(math.fsum((r - mean) ** 2 for r in rises) / (len(rises) - 1) / len(rises))
    assert mean > 2 * error, rises
    assert min(rises) > 0.0, rises


@pytest.mark.parametrize(("name", "twin"), TINY)
def test_a_twin_on_a_tiny_pipeline_runs(name: str, twin: str, tmp_path: Path) -> None:
    options = (f"run.folder={tmp_path}", "evaluation.every=3", "evaluation.samples=1", "checkpoint.export=true")
    with shapes_unchecked():
        result = train(read_config(preset=f"{name}@{twin}", overrides=(*options, *QUIET)))
    assert (result.status, result.iterations) == ("finished", 3)
    found = records(tmp_path)
    assert [record["iteration"] for record in found] == [0, 1, 2]
    assert all(record["metrics"]["log_prob_drift"] < 1e-5 for record in found)
    assert all(record["metrics"]["gradient_norm"] > 0.0 for record in found)
    assert len(records(tmp_path, "evaluation")) == 2
    assert result.export is not None
    assert (result.export / "model_index.json").is_file() or any(result.export.glob("*.safetensors"))
