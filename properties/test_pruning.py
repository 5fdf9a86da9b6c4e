"""Pruning: as defined, idempotent, free of order, backward only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchgrpo.conformance.clauses import clause
from branchgrpo.properties import strategies
from branchgrpo.properties.checks import pruning as checks
from branchgrpo.properties.subject import synthetic_trace
from branchgrpo.reference.options import Fusion

pytestmark = pytest.mark.quick


def case(data, min_splits=0):
    """A plan, rules that fit it, an iteration, and leaf keys with ties."""
    plan = data.draw(strategies.plans(min_splits=min_splits), label="plan")
    rules = data.draw(strategies.pruning_rules(plan), label="rules")
    keys = data.draw(strategies.rewards(plan, data.draw(st.integers(1, 2)), max_models=1))[..., 0]
    return plan, keys, rules, data.draw(st.integers(0, 12), label="iteration")


@clause("PRUNE-1", "PRUNE-2", "PRUNE-3", "PRUNE-4", "PRUNE-5")
@given(data=st.data())
def test_kept_edges_are_as_defined(subject, judge, data):
    judge(checks.pruning_as_defined(subject, *case(data, data.draw(st.integers(0, 2)))))


@clause("PRUNE-1")
@given(data=st.data())
def test_rules_are_idempotent_free_of_order_and_intersect(subject, judge, data):
    judge(checks.pruning_algebra(subject, *case(data, 1)))


@clause("PRUNE-3", "PRUNE-4")
@given(data=st.data())
def test_split_edges_stay(subject, judge, data):
    judge(checks.split_edges_stay(subject, *case(data, 1)))


@clause("PRUNE-2")
@given(data=st.data(), options=strategies.normalizations)
def test_leaf_keys_are_unclipped_advantages(subject, judge, data, options):
    plan = data.draw(strategies.plans(max_steps=3, max_leaves=6))
    prompts = data.draw(strategies.prompt_lists())
    trace = synthetic_trace(plan, prompts, data.draw(strategies.log_probs(plan, len(prompts))))
    rewards = data.draw(strategies.rewards(plan, len(prompts), ordinary=True))
    values = subject.implementation.fuse(trace, rewards, Fusion())
    weights = data.draw(strategies.reward_weights(rewards.shape[2]))
    judge(checks.keys_as_defined(subject, plan, values, weights, options))


@clause("PRUNE-1")
@given(data=st.data(), fusion=strategies.fusions)
def test_pruning_is_backward_only(subject, judge, data, fusion):
    plan = data.draw(strategies.plans(min_splits=1, max_steps=4, max_leaves=6))
    prompts = data.draw(strategies.prompt_lists())
    trace = synthetic_trace(plan, prompts, data.draw(strategies.log_probs(plan, len(prompts))))
    rewards = data.draw(strategies.rewards(plan, len(prompts)))
    judge(checks.backward_only(subject, trace, rewards, fusion, data.draw(strategies.pruning_rules(plan))))
