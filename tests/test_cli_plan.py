"""``branchgrpo plan``: the published counts as a table and as JSON."""

import json
from pathlib import Path

import pytest
from helpers_cli import assert_one_line_error, branchgrpo

from branchgrpo.cli.main import main
from branchgrpo.reference.presets import PRESETS

KEYS = [
    *("preset", "steps", "leaves", "nodes", "edges", "denoiser_calls", "nfe_nodes", "nfe_calls"),
    *("kept_edges", "kept_parents", "trained_edges", "trained_parents"),
]
FAMILY_KEYS = ["calls_public", "calls_shared", "calls_shared_stopped_anchor"]


def plan_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("branchgrpo", (20, 16, 219, 218, 203, 13.6875, 12.6875, 218, 203, 202, 187)),
        ("branchgrpo-widpru", (20, 16, 219, 218, 203, 13.6875, 12.6875, 138, 123, 130, 115)),
    ],
)
def test_published_arithmetic(capsys: pytest.CaptureFixture[str], preset: str, published: tuple):
    assert plan_json(capsys, "--preset", preset) == dict(zip(KEYS, (preset, *published), strict=True))


@pytest.mark.parametrize(("preset", "edges"), [("branchgrpo-deppru", 154), ("branchgrpo-deppru-5", 138)])
def test_depth_pruning_keeps(capsys: pytest.CaptureFixture[str], preset: str, edges: int):
    assert plan_json(capsys, "--preset", preset)["kept_edges"] == edges


@pytest.mark.parametrize(
    ("preset", "calls"),
    [("g2rpo-single", (1216, 1120, 1112)), ("g2rpo-12", (1792, 1552, 1544)), ("g2rpo", (2188, 1828, 1820))],
)
def test_calls_of_granularities(capsys: pytest.CaptureFixture[str], preset: str, calls: tuple[int, int, int]):
    result = plan_json(capsys, "--preset", preset)
    assert list(result) == [*KEYS, *FAMILY_KEYS]
    assert tuple(result[key] for key in FAMILY_KEYS) == calls


def test_iteration_moves_the_window(capsys: pytest.CaptureFixture[str]):
    # Depths 10..13 at first, then one deeper every 30 iterations, until depth 20 (16 untrained edges) is reached.
    trained = [
        plan_json(capsys, "--preset", "branchgrpo-deppru", "--iteration", str(t))["trained_edges"]
        for t in (0, 29, 30, 209, 210, 10_000)
    ]
    assert trained == [138, 138, 138, 138, 154, 154]


def test_without_a_preset_all_are_listed():
    listed = json.loads(branchgrpo("plan", "--json").stdout)["presets"]
    assert [entry["preset"] for entry in listed] == list(PRESETS)
    assert {tuple(entry)[: len(KEYS)] for entry in listed} == {tuple(KEYS)}
    table = branchgrpo("plan").stdout
    for name in PRESETS:
        assert f" {name} " in table
    assert max(map(len, table.splitlines())) <= 80


def test_table_shows_every_count_with_its_meaning(capsys: pytest.CaptureFixture[str]):
    result = plan_json(capsys, "--preset", "g2rpo")
    assert main(["plan", "--preset", "g2rpo"]) == 0
    table = capsys.readouterr().out
    for key in [*KEYS[1:], *FAMILY_KEYS]:
        value = result[key]
        shown = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
        (found,) = [line.split("│")[2].strip() for line in table.splitlines() if line.startswith(f"│ {key} ")]
        assert found == shown


def test_json_into_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    target = tmp_path / "counts.json"
    assert main(["plan", "--preset", "branchgrpo", "--json", str(target)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(target.read_text(encoding="utf-8")) == plan_json(capsys, "--preset", "branchgrpo")
    assert [path.name for path in tmp_path.iterdir()] == ["counts.json"]


def test_a_file_that_cannot_be_written(tmp_path: Path):
    done = branchgrpo("plan", "--preset", "branchgrpo", "--json", str(tmp_path / "none" / "counts.json"))
    assert_one_line_error(done, "cannot write", "none/counts.json", "No such file or directory")


def test_digits_and_diffusers_are_not_imported():
    after = "import atexit; atexit.register(lambda: print(sorted({'diffusers', 'sklearn'} & set(sys.modules))))"
    done = branchgrpo("plan", "--preset", "branchgrpo", before=f"import sys; {after}")
    assert done.stdout.endswith("[]\n")
