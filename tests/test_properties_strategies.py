"""Strategies draw what they promise, and shrink to plans that read at a glance."""

import math

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from branchgrpo.properties import strategies
from branchgrpo.reference.types import KernelKind, LeafOutput

QUIET = settings(
    max_examples=60, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
SEARCH = settings(QUIET, max_examples=1000)


def test_a_plan_with_a_split_shrinks_to_one_pair_of_siblings():
    plan = find(strategies.plans(min_splits=1), lambda plan: bool(plan.splits), settings=SEARCH)
    assert plan.sigmas == (1.0, 0.5, 0.0)
    assert (plan.branching, plan.roots) == ((2, 1), 1)
    assert plan.spreads[0] in (math.inf, 4.0)  # the first two of the strategy: shrinking promises a local minimum
    assert plan.spreads[1] == math.inf


def test_a_finite_spread_shrinks_to_one_split():
    plan = find(strategies.plans(), lambda p: any(not math.isinf(s) for s in p.spreads), settings=SEARCH)
    assert plan.splits
    assert plan.spreads[plan.splits[0]] == 4.0
    assert plan.leaves == 2


WANTED = {
    "every kernel": lambda plan: {k.kind for k in plan.kernels} == set(KernelKind),
    "two roots": lambda plan: plan.roots == 2,
    "two splits": lambda plan: len(plan.splits) == 2,
    "four children": lambda plan: 4 in plan.branching,
    "equal siblings": lambda plan: 0.0 in plan.spreads,
    "a denoised leaf": lambda plan: plan.output is LeafOutput.DENOISED,
    "an ODE step": lambda plan: KernelKind.ODE in {k.kind for k in plan.kernels},
}


@pytest.mark.parametrize("name", list(WANTED))
def test_every_kind_of_plan_is_drawn(name):
    find(strategies.plans(), WANTED[name], settings=SEARCH)


@QUIET
@given(st.data())
def test_plans_keep_their_limits(data):
    plan = data.draw(strategies.plans(min_splits=1, max_steps=4, max_leaves=6, max_roots=1))
    assert len(plan.splits) >= 1
    assert plan.steps <= 4
    assert plan.leaves <= 6
    assert plan.roots == 1


@QUIET
@given(st.data())
def test_ordinary_rewards_differ_within_a_tree(data):
    plan = data.draw(strategies.plans(min_splits=1))
    table = data.draw(strategies.rewards(plan, 2, ordinary=True)).reshape(2, plan.roots, plan.leaves, -1)
    assert bool((table[:, :, 0] - table[:, :, 1] == 1.0).all())


def test_rewards_hold_ties_extremes_and_near_equal_values():
    values = strategies.reward_values()
    for wanted in (lambda r: abs(r) > 1e11, lambda r: 0.0 < abs(r) < 1e-9, lambda r: 1.0 < r < 1.0 + 1e-5):
        find(values, wanted, settings=SEARCH)


@QUIET
@given(st.data())
def test_pruning_rules_fit_their_plan(data):
    plan = data.draw(strategies.plans())
    rules = data.draw(strategies.pruning_rules(plan))
    assert 1 <= len(rules) <= 2


@QUIET
@given(strategies.families())
def test_families_are_valid(family):
    assert all(family.member(*member).sigmas[-1] == 0.0 for member in family.members())
