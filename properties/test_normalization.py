"""Advantages: as defined over every scope, standard scores a depth, invariant, bounded, exactly 0 for equal rewards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchgrpo.conformance.clauses import clause
from branchgrpo.properties import strategies
from branchgrpo.properties.checks import values as checks
from branchgrpo.properties.subject import synthetic_trace
from branchgrpo.reference.options import Fusion

pytestmark = pytest.mark.quick


def case(data, ordinary=False, max_models=2, **options):
    """A trace, its rewards and its fused values."""
    plan = data.draw(strategies.plans(max_steps=3, max_leaves=6, **options), label="plan")
    prompts = data.draw(strategies.prompt_lists())
    trace = synthetic_trace(plan, prompts, data.draw(strategies.log_probs(plan, len(prompts))))
    return trace, data.draw(strategies.rewards(plan, len(prompts), max_models, ordinary))


@clause("NORM-1", "NORM-2", "NORM-3", "NORM-4", "NORM-5", "NORM-6")
@given(data=st.data(), options=strategies.normalizations)
def test_advantages_are_as_defined(subject, judge, data, options):
    trace, rewards = case(data, ordinary=data.draw(st.booleans()))
    values = subject.implementation.fuse(trace, rewards, Fusion(beta=0.0))
    weights = data.draw(strategies.reward_weights(rewards.shape[2]))
    judge(checks.normalised_as_defined(subject, trace.plan, values, weights, options))


@clause("NORM-1", "NORM-3")
@given(data=st.data())
def test_advantages_have_mean_0_and_std_1_a_depth(subject, judge, data):
    trace, rewards = case(data, ordinary=True, max_models=1, min_splits=1)
    values = subject.implementation.fuse(trace, rewards, Fusion(beta=0.0))
    judge(checks.standard_scores(subject, trace.plan, values))


@clause("NORM-6", "NORM-7")
@given(data=st.data())
def test_advantages_are_bounded(subject, judge, data):
    trace, rewards = case(data, ordinary=True, max_models=1, min_splits=1)
    values = subject.implementation.fuse(trace, rewards, Fusion(beta=0.0))
    judge(checks.bounds(subject, trace.plan, values))


@clause("NORM-4")
@given(data=st.data(), value=strategies.reward_values(), fusion=strategies.fusions)
def test_equal_rewards_give_zero(subject, judge, data, value, fusion):
    trace, _ = case(data)
    judge(checks.equal_rewards_are_zero(subject, trace, value, fusion))


@clause("NORM-7")
@given(data=st.data(), shift=st.sampled_from([1.0, -7.5, 1000.0]), factor=st.sampled_from([2.0, 0.1, 300.0]))
def test_a_constant_and_a_factor_leave_advantages(subject, judge, data, shift, factor):
    trace, rewards = case(data, ordinary=True, max_models=1, min_splits=1)
    judge(checks.reward_changes(subject, trace, rewards, Fusion(beta=0.0), shift, factor))


@clause("FUSE-1", "NORM-2")
@given(data=st.data(), fusion=strategies.fusions, options=strategies.normalizations)
def test_prompts_can_be_re_ordered(subject, judge, data, fusion, options):
    trace, rewards = case(data)
    order = data.draw(strategies.permutations(len(trace.prompts)))
    judge(checks.prompt_order(subject, trace, rewards, fusion, options, order))
