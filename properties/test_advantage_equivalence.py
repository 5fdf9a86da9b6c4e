"""Second claim: both paths give the same values, advantages, keys and masks, and grow the same trees.

Over random plans, rewards with ties and extremes, several reward models, every scope, dtypes.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from branchgrpo.conformance.clauses import clause
from branchgrpo.properties import strategies
from branchgrpo.properties.checks.equivalence import Pipeline, pipeline_findings, trace_findings
from branchgrpo.properties.loading import load_object
from branchgrpo.properties.networks import Elementwise
from branchgrpo.properties.subject import Draws, numbered_prompts, synthetic_trace
from branchgrpo.properties.tolerances import relative_to
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.types import Kernel, KernelKind

quick = pytest.mark.quick


@quick
@clause("FUSE-1", "FUSE-2", "FUSE-4", "FUSE-5", "NORM-1", "NORM-2", "NORM-3", "NORM-4", "NORM-5", "NORM-6", "PRUNE-2")
@given(data=st.data(), fusion=strategies.fusions, normalization=strategies.normalizations)
def test_values_advantages_keys_and_masks_agree(sampler, reference, judge, data, fusion, normalization):
    plan = data.draw(strategies.plans(max_steps=4, max_leaves=6), label="plan")
    prompts = data.draw(strategies.prompt_lists())
    trace = synthetic_trace(plan, prompts, data.draw(strategies.log_probs(plan, len(prompts))))
    rewards = data.draw(strategies.rewards(plan, len(prompts)))
    rules = data.draw(strategies.pruning_rules(plan))
    weights = data.draw(strategies.reward_weights(rewards.shape[2]))
    pipeline = Pipeline(fusion, normalization, rules, weights, data.draw(st.integers(0, 9)))
    judge(pipeline_findings(sampler, reference, trace, rewards, pipeline))


@quick
@clause("ROLL-1", "ROLL-3", "ROLL-5", "ROLL-6", "KERN-2", "KERN-3", "KERN-4", "KERN-5", "LOGP-1", "LOGP-2", "LOGP-3")
@pytest.mark.parametrize(
    ("dtype", "storage"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32)],
    ids=["float64", "float32"],
)
@given(plan=strategies.plans(max_steps=4, max_leaves=6), prompts=strategies.prompt_lists(), seed=strategies.seeds)
def test_trees_agree(batched, reference, judge, dtype, storage, plan, prompts, seed):
    draws = Draws((3,), dtype, storage)
    model, noise = Elementwise(), KeyedNoise(seed)
    expected = reference.grow(plan, model, noise, prompts, draws)
    found = batched.grow(plan, Elementwise().to(batched.device), noise, prompts, draws)
    name = f"{batched.name} = {reference.name}, {str(dtype).removeprefix('torch.')}"
    judge(trace_findings(name, found, expected, relative_to(dtype) * growth(expected)))


@pytest.mark.slow
@clause("ROLL-1", "KERN-3", "KERN-4", "LOGP-1", "LOGP-3")
@pytest.mark.parametrize("kind", [KernelKind.SDE, KernelKind.CPS])
def test_compiled_trees_agree(compiled, reference, judge, seed, kind):
    plan = tree_plan(4, Kernel(kind, 0.6), splits=(0, 2), branching=2, spread=4.0)
    model, noise, prompts, draws = Elementwise(), KeyedNoise(seed), numbered_prompts(2), Draws((3,))
    expected = reference.grow(plan, model, noise, prompts, draws)
    found = compiled.grow(plan, model, noise, prompts, draws)
    name = f"compiled = {reference.name}, {kind.value}"
    judge(trace_findings(name, found, expected, relative_to(torch.float64) * growth(expected)))


def growth(trace):
    """How much a mean's roundoff grows in z: max |mean|/std."""
    steps = trace.plan.stochastic_steps
    return max([1.0, *(float(trace.means[i].abs().max()) / float(trace.stds[i]) for i in steps)])


@quick
@clause("NOISE-4")
@given(plan=strategies.plans(max_steps=3, max_leaves=4), seed=strategies.seeds, iteration=st.integers(0, 5))
def test_the_batched_keyed_source_gives_the_keyed_numbers(sampler, judge, plan, seed, iteration):
    batched = load_object("branchgrpo.optimized.noise:KeyedNoise")
    draws, prompts = Draws((2, 2), iteration=iteration), numbered_prompts(2, 3)
    model = Elementwise().to(sampler.device)
    one, other = (sampler.grow(plan, model, source(seed), prompts, draws) for source in (KeyedNoise, batched))
    judge(trace_findings(f"{sampler.name}, keyed sources", one, other, 0.0))
