"""The stored calibration belongs to the checks' code, and says nothing that a right check would not."""

import ast
import json
from pathlib import Path

import pytest

from branchgrpo.properties.budget import ALPHA
from branchgrpo.properties.fingerprint import source_hash, without_docstrings

STORED = Path(__file__).resolve().parents[1] / "spec" / "studies" / "calibration.json"

LEVEL = 1e-6
"""Level of the judgement of one row: some hundred rows, so a right table fails with probability 1e-4, once, when it
is made; it is stored, not drawn again."""


@pytest.fixture(scope="module")
def stored():
    return json.loads(STORED.read_text(encoding="utf-8"))


def test_the_calibration_is_of_this_code(stored):
    assert stored["source_hash"] == source_hash(), "checks changed: run `make calibrate`"
    assert stored["alpha"] == ALPHA


def test_p_values_are_not_too_small(stored):
    assert stored["size"]
    assert [row["check"] for row in stored["size"] if row["p_not_too_small"] < LEVEL] == []
    assert [row["check"] for row in stored["size"] if row["smallest_p"] <= ALPHA] == []


def test_the_stated_power_is_not_ruled_out(stored):
    assert stored["power"]
    assert [row["check"] for row in stored["power"] if row["power_high"] < 0.999] == []


def test_whole_runs_gave_no_alarm(stored):
    assert stored["runs"]["alarms"] == 0
    assert stored["runs"]["seeds"] > 0


def test_the_hash_ignores_words_and_sees_code():
    def dump(text):
        return ast.dump(without_docstrings(ast.parse(text)))

    assert dump('def f():\n    """One."""\n    return 1\n') == dump('def f():\n    """Two."""\n    return 1  # why\n')
    assert dump("def f():\n    return 1\n") != dump("def f():\n    return 2\n")
