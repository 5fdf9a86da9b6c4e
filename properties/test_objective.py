"""The objective: as defined with its gradient, by differences, per prompt, with a KL term, A = 0 edges counted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from branchgrpo.conformance.clauses import clause
from branchgrpo.properties import strategies
from branchgrpo.properties.checks import objective as checks
from branchgrpo.properties.checks.rollout import rows_of
from branchgrpo.properties.networks import Network
from branchgrpo.properties.subject import Draws, all_kept
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import Objective
from branchgrpo.reference.types import Reduction

pytestmark = pytest.mark.quick

SHAPE = (2,)


def case(data, subject, options, off_policy=0.01, reference=False):
    """A rollout of a small plan, all edges kept, random advantages, a policy beside the one that made it."""
    plan = data.draw(strategies.plans(max_steps=3, max_leaves=4), label="plan")
    prompts, seed = data.draw(strategies.prompt_lists()), data.draw(strategies.seeds)
    reduction = data.draw(st.sampled_from(list(Reduction)))
    behaviour, policy = (Network(SHAPE, seed % 1000).to(subject.device) for _ in range(2))
    trace = subject.grow(plan, behaviour, KeyedNoise(seed), prompts, Draws(SHAPE, reduction=reduction))
    generator = torch.Generator().manual_seed(seed)
    levels = tuple(
        torch.randn(level.shape[:2], generator=generator, dtype=torch.float64).to(subject.device)
        for level in trace.states
    )
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.0 + off_policy)
    kept = all_kept(plan, len(prompts))
    return checks.Case(trace, policy, levels, kept, options, reduction, behaviour if reference else None)


@clause("OBJ-1", "OBJ-2", "OBJ-3", "OBJ-4", "OBJ-6", "OBJ-7")
@given(data=st.data(), options=strategies.objectives)
def test_j_and_its_gradient_are_as_defined(subject, judge, data, options):
    judge(checks.objective_as_defined(subject, case(data, subject, options)))


@clause("OBJ-5")
@given(data=st.data(), reduction=st.sampled_from(["edge_mean", "depth_mean"]))
def test_the_kl_term_is_as_defined(subject, judge, data, reduction):
    options = Objective(reduction=reduction, kl=0.3, edge_weights="std")
    judge(checks.objective_as_defined(subject, case(data, subject, options, reference=True), "objective with KL"))


@clause("OBJ-7")
@given(data=st.data(), direction=st.integers(0, 100))
def test_the_gradient_agrees_with_differences(subject, judge, data, direction):
    options = Objective(clip_low=0.9, clip_high=1e6)
    judge(checks.differences_findings(subject, case(data, subject, options, 1e-3), direction))


@clause("OBJ-7")
@given(data=st.data())
def test_j_is_the_mean_over_prompts(subject, judge, data):
    judge(checks.prompt_batches(subject, case(data, subject, Objective()), lambda trace, i: rows_of(trace, [i])))


@clause("OBJ-3", "OBJ-4", "OBJ-6")
@given(data=st.data(), options=strategies.objectives)
def test_edges_with_advantage_0_count(subject, judge, data, options):
    judge(checks.zero_advantages_count(subject, case(data, subject, options, off_policy=0.0)))
