"""Fused values: convex combinations of their leaves, as defined, nested, with the right limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchgrpo.conformance.clauses import clause
from branchgrpo.properties import strategies
from branchgrpo.properties.checks import values as checks
from branchgrpo.properties.subject import synthetic_trace

pytestmark = pytest.mark.quick


def case(data, **options):
    """A trace with arbitrary log-probabilities, and rewards."""
    plan = data.draw(strategies.plans(**options), label="plan")
    prompts = data.draw(strategies.prompt_lists())
    trace = synthetic_trace(plan, prompts, data.draw(strategies.log_probs(plan, len(prompts))))
    return trace, data.draw(strategies.rewards(plan, len(prompts)))


@clause("FUSE-1", "FUSE-2", "FUSE-4", "FUSE-5", "LOGP-6")
@given(data=st.data(), fusion=strategies.fusions)
def test_fused_values_are_as_defined(subject, judge, data, fusion):
    judge(checks.fusion_as_defined(subject, *case(data), fusion))


@clause("FUSE-1")
@given(data=st.data(), fusion=strategies.fusions)
def test_fused_values_lie_between_their_leaves_rewards(subject, judge, data, fusion):
    judge(checks.fusion_is_convex(subject, *case(data), fusion))


@clause("FUSE-3")
@given(data=st.data())
def test_the_path_softmax_is_a_nested_softmax(subject, judge, data):
    judge(checks.fusion_is_nested(subject, *case(data, min_splits=1)))


@clause("FUSE-2", "FUSE-6")
@given(data=st.data(), fusion=strategies.fusions)
def test_limits_in_beta(subject, judge, data, fusion):
    judge(checks.fusion_limits(subject, *case(data), fusion))


@clause("FUSE-1", "NORM-1")
@given(data=st.data(), fusion=strategies.fusions)
def test_siblings_can_be_re_ordered(subject, judge, data, fusion):
    trace, rewards = case(data, min_splits=1, max_steps=3, max_leaves=6, max_roots=1)
    step = data.draw(st.sampled_from(trace.plan.splits or (0,)))
    order = data.draw(strategies.permutations(trace.plan.branching[step]))
    judge(checks.sibling_order(subject, trace, rewards, fusion, step, order))
