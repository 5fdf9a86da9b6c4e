"""The stored studies are what the script computes, and say what they claim to say."""

import json
import math
import os
import subprocess
import sys

import pytest
from helpers_oracle import Z_BOUND

from branchgrpo.conformance.clauses import ROOT, clause

STORED = json.loads((ROOT / "spec/studies/oracle.json").read_text(encoding="utf-8"))
BY_NAME = {study["name"]: study for study in STORED["studies"]}


SIMULATED, TREES = "tree_effective_sample_size", 4000


@pytest.fixture(scope="module")
def rerun(tmp_path_factory):
    """What the script writes now; in a process of its own, where run-time type checks do not cost a minute."""
    folder = tmp_path_factory.mktemp("studies")
    command = [sys.executable, str(ROOT / "benchmarks/oracle_studies.py"), "--out", str(folder), "--trees", str(TREES)]
    subprocess.run(command, check=True, env={**os.environ, "JAXTYPING_DISABLE": "1", "OMP_NUM_THREADS": "1"})
    return folder


@pytest.fixture(scope="module")
def found(rerun):
    return {
        study["name"]: study for study in json.loads((rerun / "oracle.json").read_text(encoding="utf-8"))["studies"]
    }


def same(found, stored):
    """Equal keys and texts; numbers to the ten digits that are stored, with 1e-12 for what rounds to zero."""
    assert found.keys() == stored.keys()
    for key, value in found.items():
        if isinstance(value, float):
            assert value == pytest.approx(stored[key], rel=1e-9, abs=1e-12), key
        else:
            assert value == stored[key], key


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != SIMULATED])
def test_exact_studies_are_reproduced(found, name):
    study, stored = found[name], BY_NAME[name]
    same({k: v for k, v in study.items() if k != "rows"}, {k: v for k, v in stored.items() if k != "rows"})
    assert len(study["rows"]) == len(stored["rows"]) > 0
    for row, kept in zip(study["rows"], stored["rows"], strict=True):
        same(row, kept)


@clause("ORACLE-21")
def test_the_simulated_study_is_reproduced_within_its_error(found):
    setting = ("output", "D", "reduction", "seed")
    for row, kept in zip(found[SIMULATED]["rows"], BY_NAME[SIMULATED]["rows"], strict=True):
        assert [row[k] for k in setting] == [kept[k] for k in setting]
        assert (row["trees"], kept["trees"]) == (TREES, 400_000)
        error = math.hypot(row["standard_error"], kept["standard_error"])
        assert abs(row["size"] - kept["size"]) < Z_BOUND * error
        assert kept["standard_error"] < 2e-3


def test_every_study_is_stored_and_written_out(found, rerun):
    assert found.keys() == BY_NAME.keys()
    written, stored = (folder / "oracle.md" for folder in (rerun, ROOT / "spec/studies"))
    new, old = (page.read_text(encoding="utf-8").split(f"## {SIMULATED}")[0] for page in (written, stored))
    assert new == old


def rows(study, **wanted):
    return [row for row in BY_NAME[study]["rows"] if all(row[k] == v for k, v in wanted.items())]


def only(study, key, **wanted):
    (row,) = rows(study, **wanted)
    return row[key]


@clause("ORACLE-4", "ORACLE-5", "ORACLE-11", "ORACLE-17", "ORACLE-19", "ORACLE-20", "ORACLE-21", "ORACLE-22")
def test_findings_follow_from_the_numbers():
    variance = {k: only("leaf_moments", "variance", kernel=k, output="sample") for k in ("ode", "dance", "flow")}
    assert variance == pytest.approx({"ode": 0.18624, "dance": 0.19286, "flow": 0.21055}, abs=1e-5)
    ratios = [
        only("fusion_variance_ratio", "linear", kernel="flow", output="sample", splits="dense", spread=s)
        for s in ("inf", 4.0)
    ]
    assert ratios == pytest.approx([2.044, 2.067], abs=5e-4)
    dance = {"kernel": "dance", "output": "sample", "edge_weights": "uniform", "advantage": "none"}
    for splits, angle in (("dense", 4.3), ("late", 19.9)):
        edge, depth = (
            only("estimator_angle", "angle_all_steps", splits=splits, reduction=r, **dance)
            for r in ("edge_mean", "depth_mean")
        )
        assert edge == pytest.approx(angle, abs=0.05)
        assert depth == 0.0
    for row in rows("sibling_factor"):
        rho = 0.0 if row["spread"] == "inf" else 1 / (1 + row["spread"] ** 2)
        assert row["factor"] == pytest.approx((1 - 1 / row["K"]) * (1 - rho), rel=1e-9)
        if row["offset"] == 0.0 and rho < 1 / (row["K"] - 1):
            assert row["rescaled_variance_ratio"] > 1 - 1e-9 > row["variance_ratio"]
    for row in rows("pair_bias"):
        assert (row["bias"] > 0, row["bias"] < 0) == (row["curvature"] == "concave", row["curvature"] == "convex")
    for elements, size in ((64, 1.137), (65_536, 1.0039)):
        found = only("tree_effective_sample_size", "size", output="sample", D=elements, reduction="sum")
        assert found == pytest.approx(size, abs=1e-3)
