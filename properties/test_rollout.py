"""Rollouts: sizes, ratio 1 on policy for every storage dtype, independence of batch and order, permutations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from branchgrpo.conformance.clauses import clause
from branchgrpo.properties import strategies
from branchgrpo.properties.checks import rollout as checks
from branchgrpo.properties.networks import Elementwise
from branchgrpo.properties.subject import Draws, numbered_prompts
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.types import Reduction

pytestmark = pytest.mark.quick

DTYPES = [
    (torch.float64, torch.float64),
    (torch.float64, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
]


def small(**options):
    """Plans that the reference grows in milliseconds."""
    return strategies.plans(max_steps=4, max_leaves=6, **options)


@clause("PLAN-4", "PLAN-6", "LOGP-4", "KERN-5", "ROLL-1", "ROLL-6")
@given(plan=small(), prompts=strategies.prompt_lists(), seed=strategies.seeds)
def test_levels_have_the_plans_sizes(grower, judge, plan, prompts, seed):
    trace = grower.grow(plan, Elementwise().to(grower.device), KeyedNoise(seed), prompts)
    judge(checks.counts_findings(grower, trace))


@clause("LOGP-3", "ROLL-3", "ROLL-5", "OBJ-1", "KERN-5")
@pytest.mark.parametrize(("dtype", "storage"), DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@given(plan=small(), seed=strategies.seeds, reduction=st.sampled_from(list(Reduction)))
def test_the_ratio_is_1_on_policy(grower, judge, dtype, storage, plan, seed, reduction):
    draws = Draws((2, 3), dtype, storage, reduction)
    model = Elementwise().to(grower.device)
    trace = grower.grow(plan, model, KeyedNoise(seed), numbered_prompts(2, first=5), draws)
    judge(checks.edge_findings(grower, trace, model, draws))
    judge(checks.on_policy_value(grower, trace, model, draws))


@clause("ROLL-2", "NOISE-4")
@given(data=st.data(), plan=small(), seed=strategies.seeds)
def test_prompts_can_be_re_ordered_and_grown_alone(grower, judge, data, plan, seed):
    prompts = data.draw(strategies.prompt_lists())
    order = data.draw(strategies.permutations(len(prompts)))
    judge(checks.prompt_order(grower, plan, KeyedNoise(seed), prompts, order))


@clause("ROLL-1", "NOISE-3")
@given(data=st.data(), plan=small(min_splits=1), seed=strategies.seeds)
def test_siblings_can_be_swapped(grower, judge, data, plan, seed):
    step = data.draw(st.sampled_from(plan.splits or (0,)))
    order = data.draw(strategies.permutations(plan.branching[step]))
    prompts = data.draw(strategies.prompt_lists())
    judge(checks.sibling_order(grower, plan, KeyedNoise(seed), prompts, step, order))


@clause("ROLL-2")
@given(plan=small(), prompts=strategies.prompt_lists(), seed=strategies.seeds)
def test_a_rollout_is_a_function_of_its_arguments(grower, judge, plan, prompts, seed):
    judge(checks.repeatability(grower, plan, KeyedNoise(seed), prompts))


@clause("NOISE-4", "ROLL-1")
@given(plan=small(), prompts=strategies.prompt_lists(), seed=strategies.seeds)
def test_noise_is_keyed(grower, judge, plan, prompts, seed):
    judge(checks.iteration_matters(grower, plan, KeyedNoise(seed), prompts))
