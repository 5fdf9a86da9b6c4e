"""The benchmark command runs end to end and writes every key; the stored results have them all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from branchgrpo.reference.presets import PRESETS

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks" / "results.json"
KEYS = {
    "machine",
    "quick",
    "pairs",
    "details",
    "rollout_over_bare",
    "train_over_bare",
    "pruned_over_full",
    "speedup_over_per_node",
    "reference_over_optimized",
    "tail_exponent",
    "tail_share",
    "train_loop_over_parts",
    "stored_over_ideal_bytes",
    "calls",
}


def run(out: Path) -> dict:
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--quick", "--pairs", "1", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT)
    found: dict = json.loads((out / "results.json").read_text())
    return found


@pytest.mark.slow
def test_the_quick_benchmark_writes_every_key_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    results = run(tmp_path)
    assert set(results) == KEYS
    assert results["stored_over_ideal_bytes"] == 1.0
    assert results["calls"]["g2rpo"] == [2188, 1820]
    assert results["calls"]["branchgrpo"] == [None, 203]
    assert all(ratio < 0.8 for ratio in results["pruned_over_full"].values())
    assert "| stored over ideal bytes | 1 | 1.05 |" in (tmp_path / "results.md").read_text()
    assert not (tmp_path / "results.partial.json").exists()
    names = ("date", "cpu", "torch")
    settings = {"quick": True, "pairs": 1, **{name: results["machine"][name] for name in names}}
    kept = {name: value for name, value in results.items() if name != "calls"} | {"tail_exponent": 77.0}
    (tmp_path / "results.partial.json").write_text(json.dumps({"settings": settings, "results": kept}))
    again = run(tmp_path)
    # A run on the next day rightly starts anew; the test would then be wrong once, at midnight.
    assert again["tail_exponent"] == 77.0
    assert again["calls"] == results["calls"]


def test_the_stored_results_have_every_key_at_every_size() -> None:
    if not STORED.exists():
        pytest.skip("benchmarks/results.json is not stored here: `make bench` writes it")
    results = json.loads(STORED.read_text())
    assert set(results) == KEYS
    assert not results["quick"]
    assert results["pairs"] >= 15
    assert {"date", "cpu", "cores", "threads", "load", "python", "torch"} <= set(results["machine"])
    sizes = {"64x1", "64x4", "1024x1", "1024x4"}
    assert set(results["rollout_over_bare"]) == sizes
    assert all(set(entry) == {"fast", "keyed"} for entry in results["rollout_over_bare"].values())
    assert set(results["train_over_bare"]) == {"64x1", "64x4", "1024x1"}
    assert set(results["pruned_over_full"]) == {"branchgrpo-widpru", "branchgrpo-deppru-5"}
    assert set(results["speedup_over_per_node"]) == {"1", "4", "16"}
    assert all(set(entry) == {"64", "1024"} for entry in results["speedup_over_per_node"].values())
    assert set(results["tail_share"]) == {"64", "1024"}
    assert set(results["calls"]) == set(PRESETS)
    ratios = [
        *(ratio for entry in results["rollout_over_bare"].values() for ratio in entry.values()),
        *results["train_over_bare"].values(),
        *results["pruned_over_full"].values(),
        *(ratio for entry in results["speedup_over_per_node"].values() for ratio in entry.values()),
        results["reference_over_optimized"],
        results["tail_exponent"],
        *results["tail_share"].values(),
        results["stored_over_ideal_bytes"],
    ]
    assert all(isinstance(ratio, float) and ratio > 0.0 for ratio in ratios)
    table = STORED.with_name("results.md").read_text()
    assert results["machine"]["date"] in table
    assert results["machine"]["cpu"] in table
