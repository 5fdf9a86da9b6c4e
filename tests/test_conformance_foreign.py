"""A foreign implementation from the adapters' page alone passes, and faults in its mathematics fail their clauses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_foreign import FAULTS, ROOT, planted

from branchgrpo.conformance.clauses import load_clauses
from branchgrpo.reference.implementation import CAPABILITIES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What failed for each fault, and the verdict on the code as it is."""
    target = tmp_path_factory.mktemp("foreign") / "result.json"
    command = [sys.executable, str(ROOT / "tests" / "helpers_foreign.py"), str(target)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(target.read_text(encoding="utf-8"))


def test_as_it_is_it_passes_every_must(judged: dict[str, dict[str, str]]) -> None:
    musts = {clause.id for clause in load_clauses()[0] if clause.level == "MUST"}
    found = judged["right"]
    assert {clause: status for clause, status in found.items() if clause in musts and status != "passed"} == {}
    assert len(found) >= 68


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_its_clauses(judged: dict[str, dict[str, str]], name: str) -> None:
    assert set(judged[name]) >= FAULTS[name].clauses, judged[name]


def test_faults_are_of_every_part_of_the_method() -> None:
    parts = {clause.partition("-")[0] for fault in FAULTS.values() for clause in fault.clauses}
    assert parts >= {"KERN", "NOISE", "LOGP", "ROLL", "FUSE", "NORM", "PRUNE", "OBJ", "PLAN", "SING"}


def test_it_has_every_operation(tmp_path: Path) -> None:
    assert planted(tmp_path, None).capabilities == CAPABILITIES
