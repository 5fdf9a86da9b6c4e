"""Moving windows are full-size and cover every trainable step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchgrpo.conformance.clauses import clause
from branchgrpo.properties.checks import windows as checks
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.types import Kernel, KernelKind
from branchgrpo.reference.windows import WindowedPlan, WindowSchedule

pytestmark = pytest.mark.quick


@st.composite
def schedules(draw, order="progressive"):
    """Window schedules over up to 12 steps."""
    last = draw(st.integers(0, 11))
    size = draw(st.integers(1, last + 1))
    return WindowSchedule(
        size=size,
        last=last,
        stride=draw(st.integers(1, size)),
        period=draw(st.integers(1, 5)),
        order=order,
        decay=draw(st.sampled_from(["constant", "linear", "exponential"])),
        rate=draw(st.sampled_from([0.1, 0.0, 2.0])),
        threshold=draw(st.integers(0, 4)),
        end=draw(st.sampled_from(["stay", "stop", "wrap"])),
    )


@clause("WIN-2", "WIN-4", "WIN-5")
@given(schedule=schedules(), seed=st.integers(0, 1000))
def test_windows_are_full_size_and_cover_every_step(judge, schedule, seed):
    judge(checks.window_findings(schedule, seed))


@clause("WIN-2", "WIN-6")
@given(schedule=schedules(order="random"), seed=st.integers(0, 1000))
def test_random_windows_are_full_size_and_leave_none_out(judge, schedule, seed):
    judge(checks.random_window_findings(schedule, seed))


@clause("WIN-1", "WIN-3")
@given(schedule=schedules(), iteration=st.integers(0, 60), tree=st.booleans())
def test_plans_are_stochastic_in_the_window_and_at_splits(judge, schedule, iteration, tree):
    kernel, steps = Kernel(KernelKind.SDE, 0.3), schedule.last + 2
    base = tree_plan(steps, kernel, splits=(0,) if tree else (), branching=2, spread=4.0 if tree else math.inf)
    plan = WindowedPlan(base, schedule, group=1 if tree else 3)
    if schedule.end == "stop" and not tree:
        iteration %= len(checks.cycle(schedule, 0))
    judge(checks.windowed_plan_findings(plan, iteration, 0))
