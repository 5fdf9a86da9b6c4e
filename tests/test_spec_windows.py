"""Clauses of spec/windows.md."""

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers_spec import SDE, load_examples, small_plan

from branchgrpo.conformance.clauses import clause
from branchgrpo.reference.errors import OptionError, PlanError
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.presets import preset
from branchgrpo.reference.types import ODE, LeafOutput
from branchgrpo.reference.windows import WindowedPlan, WindowSchedule, period_at, window_steps

EXAMPLE = load_examples("windows")
MARKS = {key: EXAMPLE["progressive"][key] for key in ("size", "last", "stride", "period")}


def starts(schedule, iterations, seed=0):
    return [window_steps(schedule, t, seed)[0] for t in iterations]


@clause("WIN-2")
def test_the_example_positions():
    e = EXAMPLE["positions"]
    assert list(WindowSchedule(e["size"], e["last"], stride=e["stride"]).starts) == e["starts"]


@clause("WIN-4")
@pytest.mark.parametrize("end", ["stay", "wrap"])
def test_the_example_progress(end):
    schedule = WindowSchedule(**MARKS, end=end)
    for iteration, first in EXAMPLE["progressive"]["windows"] + EXAMPLE["progressive"][end]:
        assert window_steps(schedule, iteration, 0) == tuple(range(first, first + schedule.size))


@clause("WIN-4", "WIN-1")
def test_a_stopped_window_is_empty_and_leaves_the_splits_only():
    schedule = WindowSchedule(**MARKS, end="stop")
    over = EXAMPLE["progressive"]["stop_from"]
    assert window_steps(schedule, over - 1, 0) == (7, 8, 9, 10)
    assert window_steps(schedule, over, 0) == ()
    split = WindowedPlan(tree_plan(12, SDE, splits=(0,), branching=2), schedule)
    assert split.at(over).stochastic_steps == (0,)
    with pytest.raises(PlanError, match="with a stochastic step of the base plan at iteration 100"):
        WindowedPlan(tree_plan(12, SDE), schedule).at(over)


@clause("WIN-5")
@pytest.mark.parametrize("example", ["linear", "exponential", "half_to_even"])
def test_the_example_periods(example):
    e = EXAMPLE[example]
    decay = {"decay": "linear" if example == "half_to_even" else example}
    options = {key: e[key] for key in ("size", "last", "stride", "period", "rate", "threshold") if key in e}
    schedule = WindowSchedule(**options, **decay)
    assert [period_at(schedule, start) for start in schedule.starts] == e["periods"]
    seen = starts(schedule, range(sum(e["periods"])))
    assert [seen.count(start) for start in schedule.starts] == e["periods"]


@clause("WIN-5")
def test_a_period_is_at_least_one_iteration():
    schedule = WindowSchedule(2, 9, period=3, decay="exponential", rate=50.0, threshold=0)
    assert [period_at(schedule, start) for start in schedule.starts] == [3] + [1] * 8
    assert period_at(WindowSchedule(2, 9, period=3), 8) == 3


@clause("WIN-2")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("last", [3, 8])
def test_windows_are_full_size_and_cover_every_step(size, last):
    for stride in range(1, size + 1):
        for order in ("progressive", "random"):
            schedule = WindowSchedule(size, last, stride=stride, period=1, order=order)
            iterations = range((last + 1) * (10 if order == "random" else 1))
            windows = [window_steps(schedule, t, 0) for t in iterations]
            assert {len(window) for window in windows} == {size}
            assert set().union(*windows) == set(range(last + 1))
    with pytest.raises(OptionError, match=r"window.stride"):
        WindowSchedule(size, last, stride=size + 1)
    with pytest.raises(OptionError, match=r"window.last"):
        WindowSchedule(size, size - 2)


@clause("WIN-2")
@pytest.mark.parametrize("last", [2, 4, 5])
def test_the_range_ends_at_the_last_trainable_step(last):
    base = tree_plan(6, SDE)
    schedule = WindowSchedule(2, last)
    if last == 4:
        assert WindowedPlan(base, schedule).at(0).stochastic_steps == (0, 1)
    else:
        with pytest.raises(PlanError, match=rf"window.last = {last}"):
            WindowedPlan(base, schedule)


@clause("WIN-6", "NOISE-4")
def test_random_positions_follow_the_key_contract():
    schedule = WindowSchedule(4, 10, stride=3, period=5, order="random", end="stop")
    found = starts(schedule, range(100), seed=3)
    for t, start in enumerate(found):
        counter = np.array([0, 0, 4 << 56, 0], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(key=np.array([3, t // 5], dtype=np.uint64), counter=counter))
        assert start == schedule.starts[int(generator.integers(4))]
    assert set(found) == set(schedule.starts)
    assert found != starts(schedule, range(100), seed=4)


@clause("WIN-1", "WIN-3")
def test_branchgrpo_mix_keeps_its_splits_and_trains_what_is_stochastic():
    sampler = preset("branchgrpo-mix").sampler
    assert isinstance(sampler, WindowedPlan)
    for iteration, window in ((0, {0, 1, 2, 3}), (25, {1, 2, 3, 4}), (375, {15, 16, 17, 18}), (9999, {15, 16, 17, 18})):
        plan = sampler.at(iteration)
        assert set(plan.stochastic_steps) == set(plan.trainable_steps) == window | {0, 3, 6, 9}
        assert plan.splits == (0, 3, 6, 9)
        assert all((k == ODE) == (i not in window | {0, 3, 6, 9}) for i, k in enumerate(plan.kernels))


@clause("WIN-3", "WIN-1", "PLAN-9")
def test_mixgrpo_splits_into_its_group_at_the_windows_first_step():
    sampler = preset("mixgrpo").sampler
    assert isinstance(sampler, WindowedPlan)
    for iteration, first in ((0, 0), (24, 0), (25, 1), (500, 20), (525, 20)):
        plan = sampler.at(iteration)
        assert plan.stochastic_steps == tuple(range(first, first + 4))
        assert (plan.splits, plan.branching[first], plan.spreads[first]) == ((first,), 12, math.inf)
    with pytest.raises(PlanError, match="group = 2"):
        WindowedPlan(tree_plan(6, SDE, splits=(0,), branching=2), WindowSchedule(2, 4), group=2)


@clause("WIN-1")
def test_named_trained_steps_rest_outside_the_window():
    base = replace(tree_plan(6, SDE, output=LeafOutput.SAMPLE), trained_steps=(0, 2, 3, 4))
    windowed = WindowedPlan(base, WindowSchedule(2, 4, period=1))
    assert [windowed.at(t).trainable_steps for t in range(4)] == [(0,), (2,), (2, 3), (3, 4)]


@clause("WIN-1", "ERR-1")
def test_iterations_count_from_zero():
    with pytest.raises(OptionError, match="iteration = -1"):
        window_steps(WindowSchedule(2, 4), -1, 0)
    assert small_plan((0,)).stochastic_steps == (0, 1, 2, 3)
