"""Acceptance of the demo, and the script that judges a results file."""

import copy
import json

import pytest

from branchgrpo.reference.errors import InputError
from branchgrpo.training.demo import check
from branchgrpo.training.demo.config import LABELS
from branchgrpo.training.demo.results import Point, Run, acceptance, results_document, summarise


def run_of(method, seed, gain=1.0, judge=(0.99, 0.99), calls=1000, seconds=3.0):
    curve = (Point(0, 0.0, -2.0, judge[0]), Point(calls, seconds, -2.0 + gain, judge[1]))
    return Run(method, seed, 10, 10, calls - 400, 400, seconds, curve)


def document(runs=None, seconds=100.0):
    runs = runs or [run_of(method, seed, 1.0 + 0.1 * seed) for method in LABELS for seed in range(3)]
    counts = {method: {"label": label} for method, label in LABELS.items()}
    return results_document(runs, counts, {"seeds": 3}, {"seconds": {"total": seconds}, "environment": {}})


def failures(runs, seconds=100.0, **more):
    by_method = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run.summary())
    return [(c.method, c.name) for c in acceptance(by_method, {"total": seconds, **more}) if not c.passed]


def test_gains_and_their_spread_are_those_of_the_runs():
    summary = summarise([run_of("g2rpo", seed, gain).summary() for seed, gain in enumerate((1.0, 2.0, 4.5))])
    assert summary["mean_gain"] == pytest.approx(2.5)
    assert summary["sd_gain"] == pytest.approx((((1.5**2) + 0.5**2 + 2.0**2) / 2) ** 0.5)
    assert summary["mean_final_reward"] == pytest.approx(0.5)
    assert summarise([run_of("g2rpo", 0).summary()])["sd_gain"] is None


def test_a_good_demo_is_accepted():
    assert document()["acceptance"]["passed"]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([run_of("g2rpo", 0, 0.1), run_of("g2rpo", 1, 1.0)], "gain in standard deviations of the seeds"),
        ([run_of("g2rpo", 0, -1.0), run_of("g2rpo", 1, -1.0)], "gain in standard deviations of the seeds"),
        ([run_of("g2rpo", 0, 1.0)], "gain in standard deviations of the seeds"),
        ([run_of("g2rpo", i, 1.0 + 0.1 * i, (0.979, 0.99)) for i in (0, 1)], "judge's accuracy, base model"),
        ([run_of("g2rpo", 0, 1.0), run_of("g2rpo", 1, 1.1, (0.99, 0.9795))], "judge's accuracy lost, worst seed"),
        ([run_of("g2rpo", 0, 1.0), run_of("g2rpo", 1, 1.1, calls=1011)], "spread of total denoiser calls"),
    ],
)
def test_each_condition_can_fail_alone(runs, expected):
    assert [name for _, name in failures(runs)] == [expected]


def test_the_limits_themselves_are_accepted():
    runs = [run_of("g2rpo", 0, 1.0, (0.98, 0.97)), run_of("g2rpo", 1, 1.0, (0.98, 0.97), calls=1010)]
    assert failures(runs, 360.0) == []
    assert failures(runs, 360.1) == [("all", "seconds on two cores")]
    # a busy machine: what counts is the processor time, shared by two cores
    assert failures(runs, 9999.0, processor=720.0) == []
    assert failures(runs, 9999.0, processor=720.1) == [("all", "seconds on two cores")]
    assert failures(runs, 360.0, processor=9999.0) == []


def write(tmp_path, content):
    path = tmp_path / "results.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_check_accepts_and_names_what_fails(tmp_path, capsys):
    good = document()
    assert check.main([str(write(tmp_path, good))]) == 0
    assert "FAILS" not in capsys.readouterr().out
    judged = {"branchgrpo": 0.99, "dancegrpo": 0.95, "g2rpo": 0.99}
    bad = document([run_of(m, s, 1.0 + 0.1 * s, (0.99, judged[m])) for m in LABELS for s in (0, 1)])
    assert check.main([str(write(tmp_path, bad))]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILS")]
    assert line.split()[1] == "dancegrpo"
    assert "judge's accuracy lost, worst seed: 0.04 (required ≤ 0.01)" in line


def test_the_check_believes_no_stored_verdict_and_no_stored_gain(tmp_path):
    forged = document()
    for run in forged["methods"]["branchgrpo"]["runs"]:
        run["final_reward"] = run["base_reward"]
    assert forged["acceptance"]["passed"]
    assert check.main([str(write(tmp_path, forged))]) == 1


def test_an_unusable_file_is_named(tmp_path, capsys):
    good = document()
    cases = [("{", "results = "), ({**good, "schema": 0}, "results.schema = 0")]
    for change, field in (
        (lambda d: d["methods"].pop("g2rpo"), "results.methods ="),
        (lambda d: d["methods"]["g2rpo"].update(runs=[]), "results.methods.g2rpo.runs = []"),
        (lambda d: d["methods"]["g2rpo"]["runs"][1].pop("calls"), "results.methods.g2rpo.runs[1] = ['calls']"),
        (lambda d: d.pop("seconds"), "results.seconds = {}"),
        (lambda d: d["seconds"].update(processor="2 min"), "results.seconds = {"),
    ):
        broken = copy.deepcopy(good)
        change(broken)
        cases.append((broken, field))
    for content, field in cases:
        assert check.main([str(write(tmp_path, content))]) == 2
        assert capsys.readouterr().err.startswith(field)
    with pytest.raises(InputError, match="readable JSON file"):
        check.read_results(tmp_path / "missing.json")
    assert check.main([]) == 2
