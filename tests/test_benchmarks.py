"""The benchmark command runs end to end and writes every key."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KEYS = {
    "machine",
    "quick",
    "pairs",
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


@pytest.mark.slow
def test_the_quick_benchmark_writes_every_key(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--quick", "--pairs", "1", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT)
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results) == KEYS
    assert results["stored_over_ideal_bytes"] == 1.0
    assert results["calls"]["g2rpo"] == [2188, 1820]
    assert results["calls"]["branchgrpo"] == [None, 203]
    assert all(entry["ratio"] < 0.8 for entry in results["pruned_over_full"].values())
    assert "| stored over ideal bytes | 1 | 1.05 |" in (tmp_path / "results.md").read_text()
