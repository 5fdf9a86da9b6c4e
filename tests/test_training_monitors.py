"""Monitors of a run: what they measure, the same over parts and processes, and what their limits say."""

import json
import math
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import helpers_training_watch as watch
import pytest
import torch
from helpers_optimized import SmallModel, accumulated, close, shapes_unchecked
from helpers_training import records, run_small
from helpers_training_watch import PROMPTS, WEIGHTS, outcomes_of, parts_of, task_of, updater_of, watched
from hypothesis import given, settings
from hypothesis import strategies as st

from branchgrpo.optimized.update import UpdateStats
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.options import Fusion
from branchgrpo.reference.presets import preset
from branchgrpo.reference.types import Reduction
from branchgrpo.training.checkpoint.layout import steps
from branchgrpo.training.config.schema import Limit, MonitorsConfig, UpdateConfig
from branchgrpo.training.engine.distributed import Cluster
from branchgrpo.training.engine.iteration import PartOutcome
from branchgrpo.training.engine.steps import merged
from branchgrpo.training.monitors.baselines import Scored, relative, reward_gap
from branchgrpo.training.monitors.depths import accumulate_step, gradient_norms_by_depth, kept_edges
from branchgrpo.training.monitors.limits import MONITORS, MonitorStop, judge, stop_if_asked
from branchgrpo.training.monitors.measure import effective_samples, leaf_distance, measure, path_weights
from branchgrpo.training.monitors.moments import Moments, merge
from branchgrpo.training.monitors.steps import update_metrics

ALONE = Cluster()
WIDPRU = preset("branchgrpo-widpru")


@pytest.fixture(scope="module")
def iteration() -> list[PartOutcome]:
    """One iteration of BranchGRPO in one part."""
    with shapes_unchecked():
        task = task_of(SmallModel(1))
        return outcomes_of(WIDPRU, task, parts_of(task, 0, 1, 1), ALONE)


@pytest.fixture(scope="module")
def flat() -> list[PartOutcome]:
    """One iteration of Flow-GRPO: trees of a single leaf."""
    with shapes_unchecked():
        task = task_of(SmallModel(1))
        return outcomes_of(preset("flowgrpo"), task, parts_of(task, 0, 1, 1), ALONE)


def same(found: dict[str, float], expected: dict[str, float], tolerance: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=tolerance, abs=1e-13), name


@settings(derandomize=True)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=6), min_size=1, max_size=5))
def test_moments_of_parts_are_those_of_the_whole(parts: list[list[float]]) -> None:
    whole = Moments.of(value for part in parts for value in part)
    found = merge({"x": Moments.of(part)} for part in parts)["x"]
    assert (found.count, found.low, found.high) == (whole.count, whole.low, whole.high)
    if whole.count:
        scale = max(abs(whole.low), abs(whole.high))
        assert found.mean == pytest.approx(whole.mean, abs=1e-12 * scale)
        assert found.std == pytest.approx(whole.std, abs=1e-6 * scale)


def test_a_nan_among_the_numbers_stays_one() -> None:
    found = Moments.of([1.0, math.nan]) + Moments.of([2.0])
    assert math.isnan(found.mean)
    assert math.isnan(found.std)


@shapes_unchecked()
def test_what_is_measured_is_what_its_definition_says(iteration: list[PartOutcome]) -> None:
    found = measure(iteration, WIDPRU, WEIGHTS)
    (outcome,) = iteration
    pull = [[float(r) for r in row] for row in outcome.rewards[..., 0]]
    every = [r for row in pull for r in row]
    mean = math.fsum(every) / len(every)
    assert found["reward/pull/mean"] == pytest.approx(mean)
    assert found["reward/pull/std"] == pytest.approx(math.sqrt(math.fsum((r - mean) ** 2 for r in every) / len(every)))
    assert (found["reward/pull/min"], found["reward/pull/max"]) == (min(every), max(every))
    spreads = []
    for row in pull:
        centre = math.fsum(row) / len(row)
        spreads.append(math.sqrt(math.fsum((r - centre) ** 2 for r in row) / len(row)))
    assert found["reward_spread/pull"] == pytest.approx(math.fsum(spreads) / len(spreads))
    assert found["reward_spread"] == min(found["reward_spread/pull"], found["reward_spread/push"])
    assert found["degenerate_groups"] == 0.0
    sizes = outcome.tree.plan.level_sizes
    for step in outcome.tree.plan.trainable_steps:
        level = outcome.advantages[step + 1]
        name = f"advantage_spread/depth_{step + 1:02d}"
        assert sizes[step + 1] > 1
        assert found[name] == pytest.approx(float(level.std(correction=0)))
    depths = [value for name, value in found.items() if name.startswith("advantage_spread/")]
    assert len(depths) == len(outcome.tree.plan.trainable_steps)
    assert found["advantage_spread"] == min(depths)


@shapes_unchecked()
def test_distances_are_those_of_pairs(iteration: list[PartOutcome]) -> None:
    leaves = iteration[0].tree.leaves
    found = leaf_distance(leaves, 1)
    for row, value in zip(leaves, found.tolist(), strict=True):
        flat = row.flatten(1)
        squares = [
            float((flat[i] - flat[j]).square().sum()) for i in range(len(flat)) for j in range(len(flat)) if i != j
        ]
        assert value == pytest.approx(math.sqrt(math.fsum(squares) / len(squares)))


@shapes_unchecked()
def test_effective_samples_are_all_leaves_at_beta_0_and_fewer_above(iteration: list[PartOutcome]) -> None:
    (outcome,) = iteration
    sizes = {beta: effective_samples(path_weights(outcome.tree, Fusion(beta=beta))) for beta in (0.0, 1.0, 30.0)}
    assert torch.allclose(sizes[0.0], torch.full((PROMPTS, 1), 16.0, dtype=torch.float64), rtol=1e-12)
    assert (sizes[30.0] < sizes[1.0]).all()
    assert (sizes[1.0] < 16.0).all()


@shapes_unchecked()
def test_path_weights_are_the_softmax_of_the_paths_log_probabilities(iteration: list[PartOutcome]) -> None:
    tree = iteration[0].tree
    total = torch.zeros(PROMPTS, 16, dtype=torch.float64)
    for log_prob in tree.log_probs:
        if log_prob is not None:
            total += log_prob.repeat_interleave(16 // log_prob.shape[1], dim=1)
    assert close(path_weights(tree, Fusion(beta=0.7))[:, 0], torch.softmax(0.7 * total, dim=1))


@shapes_unchecked()
def test_sums_of_log_probabilities_leave_one_leaf_and_the_monitor_says_so() -> None:
    method = replace(WIDPRU, log_prob=Reduction.SUM, fusion=Fusion(beta=20.0))
    task = task_of(SmallModel(1))
    found = measure(outcomes_of(method, task, parts_of(task, 0, 1, 1), ALONE), method, WEIGHTS)
    assert 1.0 <= found["effective_sample_size/leaves"] < 3.0
    assert 0.0 <= found["effective_sample_size"] < 0.2
    findings = judge(found, MonitorsConfig(effective_sample_size=Limit(warn=0.2)))
    assert [f.monitor for f in findings] == ["effective_sample_size"]
    assert "fusion.beta" in findings[0].text


@shapes_unchecked()
def test_trees_of_one_leaf_are_compared_within_their_prompt(flat: list[PartOutcome]) -> None:
    found = measure(flat, preset("flowgrpo"), WEIGHTS)
    (outcome,) = flat
    assert outcome.tree.plan.leaves == 1
    assert "effective_sample_size" not in found
    spread = outcome.rewards[..., 0].std(dim=1, correction=0).mean()
    assert found["reward_spread/pull"] == pytest.approx(float(spread))
    assert found["diversity/distance"] > 0.0


@shapes_unchecked()
def test_equal_rewards_are_degenerate_only_if_all_that_trains_is_equal(iteration: list[PartOutcome]) -> None:
    rewards = iteration[0].rewards.clone()
    rewards[0, :, 0] = 0.25
    part = replace(iteration[0], rewards=rewards)
    assert measure([part], WIDPRU, WEIGHTS)["degenerate_groups"] == 0.0
    assert measure([part], WIDPRU, {"pull": 1.0, "push": 0.0})["degenerate_groups"] == 1 / PROMPTS
    found = measure([part], WIDPRU, {"pull": 0.0, "push": 1.0})
    assert found["degenerate_groups"] == 0.0
    assert found["reward_spread"] == found["reward_spread/push"], "a model that does not train is not looked at"


@shapes_unchecked()
@pytest.mark.parametrize("name", ["branchgrpo-widpru", "g2rpo", "mixgrpo", "flowgrpo"])
def test_parts_make_no_difference(name: str) -> None:
    same(watched(name, ALONE, accumulation=2), watched(name, ALONE, accumulation=1), tolerance=1e-9)


@shapes_unchecked()
@pytest.mark.parametrize("name", ["branchgrpo-widpru", "tempflow"])
def test_the_depths_gradients_add_up_to_that_of_the_update(name: str) -> None:
    method, model = preset(name), SmallModel(1)
    task = task_of(model)
    parts = parts_of(task, 0, 1, 2)
    outcomes = outcomes_of(method, task, parts, ALONE)
    updater = updater_of(method, model, ALONE, UpdateConfig(accumulation=2, step_per="iteration"))
    updater.gradients(parts, outcomes)
    whole = accumulated(model)
    total = torch.zeros_like(whole)
    steps = sorted({step for o in outcomes for step in o.tree.plan.trainable_steps})
    norms = gradient_norms_by_depth(updater, parts, outcomes)
    assert torch.equal(accumulated(model), whole), "gradients stay as they were"
    for step in steps:
        counts = kept_edges(outcomes, step, len(parts))
        if not any(counts):
            continue
        model.zero_grad()
        accumulate_step(updater, parts, outcomes, step, counts)
        total += accumulated(model)
        assert norms[f"gradient_norm/depth_{step + 1:02d}"] == pytest.approx(float(accumulated(model).norm()))
    assert close(total, whole, 1e-11)
    assert len(norms) > 1


def stats(**changes: float) -> UpdateStats:
    base = {"objective": 0.1, "clip_fraction": 0.2, "ratio_mean": 1.0, "ratio_min": 0.9, "ratio_max": 1.2, "kl": 0.01}
    return UpdateStats(**base | {"edges": 10, "parents": 5, "batches": 1} | changes)


def test_drift_is_that_of_the_first_step_only() -> None:
    first, second = stats(ratio_min=1.0 - 1e-7, ratio_max=1.0 + 1e-7), stats(edges=30, clip_fraction=0.6)
    found = update_metrics([first, second], [0.5, 0.7], 1e-4)
    assert found["log_prob_drift"] == pytest.approx(1e-7, rel=1e-3)
    assert found["clip_fraction"] == pytest.approx((10 * 0.2 + 30 * 0.6) / 40)
    assert (found["ratio/min"], found["ratio/max"], found["gradient_norm"]) == (0.9, 1.2, 0.7)
    assert (found["edges_trained"], found["update_calls"], found["learning_rate"]) == (40.0, 10.0, 1e-4)


@pytest.mark.parametrize(("low", "drift"), [(0.0, math.inf), (math.nan, math.nan), (0.5, math.log(2.0))])
def test_drift_of_ratios_that_are_far_off(low: float, drift: float) -> None:
    found = update_metrics([stats(ratio_min=low, ratio_max=1.0)], [1.0], 1e-4)["log_prob_drift"]
    assert found == pytest.approx(drift, nan_ok=True)
    assert judge({"log_prob_drift": found}, MonitorsConfig())[0].monitor == "log_prob_drift"


def test_parts_of_a_step_count_as_their_merger() -> None:
    parts = [stats(edges=10, ratio_min=0.8), stats(edges=20, clip_fraction=0.5)]
    same(update_metrics(parts, [1.0], 1e-4), update_metrics([merged(parts)], [1.0], 1e-4))


def test_updates_without_steps_are_refused() -> None:
    with pytest.raises(InputError, match="multiple of the number of steps, 2"):
        update_metrics([stats()], [1.0, 2.0], 1e-4)


@shapes_unchecked()
def test_on_policy_the_drift_is_rounding_and_a_changed_model_shows(iteration: list[PartOutcome]) -> None:
    for scale, largest in ((1.0, 1e-12), (1.01, 1.0)):
        model = SmallModel(1)
        with torch.no_grad():
            model.weight.mul_(scale)
        task = task_of(model)
        updater = updater_of(WIDPRU, model, ALONE)
        updates, norms, rate = updater.improve(parts_of(task, 0, 1, 1), iteration)
        drift = update_metrics(updates, norms, rate)["log_prob_drift"]
        assert drift < largest
        assert (drift > 1e-5) == (scale != 1.0)
        findings = [f.monitor for f in judge({"log_prob_drift": drift}, MonitorsConfig())]
        assert findings == (["log_prob_drift"] if scale != 1.0 else [])


def test_every_limit_of_the_configuration_has_a_monitor() -> None:
    names = {field.name for field in fields(MonitorsConfig) if isinstance(field.default, Limit)}
    assert names == set(MONITORS)


@pytest.mark.parametrize("name", list(MONITORS))
def test_both_sides_of_both_thresholds(name: str) -> None:
    monitor = MONITORS[name]
    sign = 1.0 if monitor.side == "above" else -1.0
    config = replace(MonitorsConfig(), **{name: Limit(warn=0.5, stop=0.5 + 0.2 * sign)})
    key = monitor.keys[0]
    for value, levels in ((0.5, []), (0.5 - sign, []), (0.5 + 0.1 * sign, ["warn"]), (0.5 + 0.4 * sign, ["stop"])):
        findings = judge({key: value}, config)
        assert [f.level for f in findings] == levels
        if levels == ["stop"]:
            with pytest.raises(MonitorStop, match=rf"{key} at iteration 7 = .*monitors\.{name}\.stop"):
                stop_if_asked(findings, 7)
        else:
            stop_if_asked(findings, 7)
    silent = replace(MonitorsConfig(), **{name: Limit()})
    assert judge({key: 0.5 + 100.0 * sign}, silent) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", list(MONITORS))
def test_what_is_not_finite_ends_the_run_whatever_the_limits(name: str, value: float) -> None:
    findings = judge({MONITORS[name].keys[0]: value}, replace(MonitorsConfig(), **{name: Limit()}))
    assert [f.level for f in findings] == ["stop"]
    with pytest.raises(MonitorStop, match="must be finite"):
        stop_if_asked(findings, 0)


def test_after_a_number_that_is_not_finite_the_last_good_checkpoint_stays_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from branchgrpo.training.engine import run

    real = run.update_metrics
    monkeypatch.setattr(run, "update_metrics", lambda *given: real(*given) | {"kl": seen.pop(0)})
    seen = [0.0, math.nan]
    with pytest.raises(MonitorStop, match="kl at iteration 1 = nan: must be finite"):
        run_small(tmp_path, "run.iterations=3", "checkpoint.every=1")
    assert [path.name for path in steps(tmp_path)] == ["step-000001"]
    assert records(tmp_path)[1]["metrics"]["kl"] is None
    assert records(tmp_path, "end")[0]["reason"] == "stopped"


def test_diversity_is_a_share_of_the_first() -> None:
    baselines: dict[str, float] = {}
    assert relative({"diversity/distance": 4.0}, baselines) == {"diversity": 1.0}
    assert relative({"diversity/distance": 1.0, "evaluation/distance": 2.0}, baselines) == {
        "diversity": 0.25, "evaluation/diversity": 1.0,
    }  # fmt: skip
    assert json.loads(json.dumps(baselines)) == {"diversity/distance": 4.0, "evaluation/distance": 2.0}
    assert [f.key for f in judge(relative({"diversity/distance": 1.0}, baselines), MonitorsConfig())] == ["diversity"]
    assert relative({"diversity/distance": 0.0}, {}) == {}


def scored(trained: float, held: float, held_range: tuple[float, float], held_std: float = 0.5) -> tuple[Scored, ...]:
    return (
        Scored("trained", 1.0, False, (-math.inf, 0.0), trained, 2.0),
        Scored("held", 1.0, True, held_range, held, held_std),
    )


OPEN = (-math.inf, math.inf)


def test_the_gap_opens_when_the_held_out_reward_does_not_follow() -> None:
    baselines: dict[str, float] = {}
    assert reward_gap(scored(-8.0, 1.0, OPEN), baselines) == 0.0
    assert reward_gap(scored(-4.0, 2.0, OPEN), baselines) == pytest.approx(2.0 - 2.0)
    assert reward_gap(scored(-2.0, 1.0, OPEN), baselines) == pytest.approx(3.0)
    assert reward_gap(scored(-8.0, 0.0, OPEN), baselines) == pytest.approx(2.0), "only the held-out one falls"


def test_a_held_out_reward_at_its_bound_need_not_rise_and_must_not_fall() -> None:
    baselines: dict[str, float] = {}
    accuracy = (0.0, 1.0)
    assert reward_gap(scored(-8.0, 1.0, accuracy, held_std=0.0), baselines) == 0.0
    assert reward_gap(scored(-2.0, 1.0, accuracy, held_std=0.0), baselines) == 0.0
    assert reward_gap(scored(-2.0, 0.9, accuracy, held_std=0.3), baselines) == pytest.approx(2.0)


def test_a_reward_that_is_wanted_small_turns_around() -> None:
    trained, held = scored(-8.0, 1.0, OPEN)
    baselines: dict[str, float] = {}
    reward_gap((replace(trained, weight=-2.0), held), baselines)
    assert reward_gap((replace(trained, weight=-2.0, mean=-10.0), held), baselines) == pytest.approx(1.0)


def test_without_anything_held_out_there_is_no_gap() -> None:
    trained, held = scored(-8.0, 1.0, OPEN)
    assert reward_gap((trained,), {}) is None
    assert reward_gap((trained, replace(held, held_out=False, weight=0.0)), {}) == 0.0, "weight 0 is held out, too"


@pytest.mark.slow
def test_two_processes_measure_what_one_does(tmp_path: Path) -> None:
    script = Path(watch.__file__)
    environment = {**os.environ, "PYTHONPATH": str(script.parent), "OMP_NUM_THREADS": "1", "JAXTYPING_DISABLE": "1"}
    workers = [
        subprocess.Popen([sys.executable, str(script), str(rank), "2", str(tmp_path)], env=environment)
        for rank in (0, 1)
    ]
    try:
        assert [worker.wait(timeout=240) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
    assert first == second
    with shapes_unchecked():
        expected: dict[str, Any] = {name: watched(name, ALONE, 1) for name in first}
    for name, found in first.items():
        same(found, expected[name], tolerance=1e-9)
        assert any(key.startswith("gradient_norm/") for key in found)
        assert any(key.startswith("evaluation/") for key in found)
