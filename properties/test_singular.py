"""Plan families: shared anchors, noise at step k alone, granular advantages, exact laws of the children."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchgrpo.conformance.clauses import clause
from branchgrpo.properties import strategies
from branchgrpo.properties.checks import singular as checks
from branchgrpo.properties.exact import as_array
from branchgrpo.properties.networks import Elementwise
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import Kernel, KernelKind

pytestmark = pytest.mark.quick

small = strategies.families(max_steps=4)


@clause("SING-1", "SING-2", "SING-3", "GRAN-1", "GRAN-2")
@given(family=small, prompts=strategies.prompt_lists(), seed=strategies.seeds)
def test_members_share_the_anchor_and_the_children(grower, judge, family, prompts, seed):
    members = grower.grow_family(family, Elementwise().to(grower.device), KeyedNoise(seed), prompts)
    judge(checks.sharing_findings(grower, family, members))


@clause("SING-1", "SING-2")
@given(family=small, prompts=strategies.prompt_lists(), seed=strategies.seeds)
def test_only_the_noise_of_step_k_moves_a_leaf(subject, judge, family, prompts, seed):
    judge(checks.singular_noise(subject, family, KeyedNoise(seed), prompts))


@clause("GRAN-4", "GRAN-5")
@given(data=st.data(), family=small, options=strategies.normalizations)
def test_granular_advantages_are_as_defined(subject, judge, data, family, options):
    prompts = data.draw(st.integers(1, 2))
    k = data.draw(st.sampled_from(family.ks))
    models = data.draw(st.integers(1, 2))
    plan = family.member(k, 1)
    rewards = {}
    for granularity in family.granularities:
        table = as_array(data.draw(strategies.rewards(plan, prompts, ordinary=True)))
        rewards[granularity] = table[..., :1].repeat(models, axis=2)
    weights = data.draw(strategies.reward_weights(models))
    judge(checks.granular_definition(subject, family, k, rewards, weights, options))


@clause("GRAN-6")
@given(family=small, prompts=strategies.prompt_lists(), seed=strategies.seeds)
def test_one_granularity_is_a_plan_with_one_split(subject, judge, family, prompts, seed):
    judge(checks.one_granularity_findings(subject, family, KeyedNoise(seed), prompts))


@clause("SING-2", "GRAN-1")
def test_children_have_their_exact_law(sampler, source, scale, judge):
    """λ = 2 carries the children of λ = 1 (SING-3) along another continuation, against that continuation's own law.

    Right code therefore has the p-values of λ = 1 again: mean and variance, two steps, two sources, so eight of a run's
    p-values repeat others.  Bonferroni holds for p-values however they depend, so they cost level and nothing else, and
    a wrong continuation (GRAN-1) or other children (SING-3) move them alone.
    """
    kernel = Kernel(KernelKind.FLOW_SDE, 0.7)
    family = PlanFamily(shifted_schedule(8), kernel, (0, 2), group=2, granularities=(1, 2))
    found = checks.child_law(sampler, family, source.noise, max(400, int(48_000 * scale)))
    judge(replace(f, name=f.name.replace(", child", f", {source.name} noise, child", 1)) for f in found)
