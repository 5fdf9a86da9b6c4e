"""Updates of several plans at once, of kept edges with a KL term, and of chains that train subsets of their steps."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from branchgrpo.conformance.clauses import clause
from branchgrpo.properties import strategies
from branchgrpo.properties.checks import objective
from branchgrpo.properties.checks import updates as checks
from branchgrpo.properties.networks import Network
from branchgrpo.properties.objective_definition import trained_masks
from branchgrpo.properties.subject import Draws, all_kept
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput, Reduction

pytestmark = pytest.mark.quick

SHAPE = (2,)
SDE = Kernel(KernelKind.SDE, 0.6)


def case(subject, plan, prompts, seed, options, reduction, kept_of):
    """One plan's part of an update off policy, with a reference model if there is a KL term."""
    behaviour, policy, frozen = (Network(SHAPE, seed % 1000).to(subject.device) for _ in range(3))
    trace = subject.grow(plan, behaviour, KeyedNoise(seed), prompts, Draws(SHAPE, reduction=reduction))
    with torch.no_grad():
        for parameter, other in zip(policy.parameters(), frozen.parameters(), strict=True):
            parameter.mul_(1.01)
            other.mul_(0.9)
    generator = torch.Generator().manual_seed(seed)
    levels = tuple(torch.randn(s.shape[:2], generator=generator, dtype=torch.float64) for s in trace.states)
    levels = tuple(level.to(subject.device) for level in levels)
    kept = kept_of(levels[-1])
    alive = torch.stack([mask.any(dim=1) for mask in trained_masks(plan, kept).values()]).any(dim=0)
    if not bool(alive.all()):
        kept = all_kept(plan, len(prompts))
    frozen = frozen if options.kl > 0 else None
    return objective.Case(trace, policy, levels, kept, options, reduction, frozen)


@clause("OBJ-3", "OBJ-4", "OBJ-5", "OBJ-6", "PRUNE-6")
@given(data=st.data(), options=strategies.objectives, kl=st.sampled_from([0.3, 0.0]))
def test_dropped_edges_are_in_no_mean(subject, judge, data, options, kl):
    plan = data.draw(strategies.plans(max_steps=3, max_leaves=4, min_splits=1), label="plan")
    rules, iteration = data.draw(strategies.pruning_rules(plan)), data.draw(st.integers(0, 6))
    prompts, seed = data.draw(strategies.prompt_lists()), data.draw(strategies.seeds)
    reduction = data.draw(st.sampled_from(list(Reduction)))

    def kept_of(keys):
        return subject.implementation.prune(plan, keys, rules, iteration)

    update = case(subject, plan, prompts, seed, replace(options, kl=kl), reduction, kept_of)
    judge(objective.objective_as_defined(subject, update, "objective of kept edges"))


@st.composite
def plan_pairs(draw):
    """Two plans of one schedule that train different steps, some of them maybe the same."""
    steps = draw(st.integers(3, 4))
    subsets = st.lists(st.integers(0, steps - 2), min_size=1, unique=True)
    return [
        tree_plan(steps, SDE, splits=(sde[0],), branching=2, spread=2.0, sde_steps=sorted(sde), roots=roots)
        for sde, roots in ((draw(subsets), draw(st.integers(1, 2))) for _ in range(2))
    ]


@clause("OBJ-4", "OBJ-6", "OBJ-7")
@given(
    plans=plan_pairs(),
    options=strategies.objectives,
    prompts=strategies.prompt_lists(),
    seed=strategies.seeds,
    kl=st.sampled_from([0.0, 0.3]),
)
def test_an_update_of_two_plans_is_one_mean(subject, judge, plans, options, prompts, seed, kl):
    cases = [
        case(subject, plan, prompts, seed, replace(options, kl=kl), Reduction.MEAN, lambda _, p=plan: ones(p, prompts))
        for plan in plans
    ]
    judge(checks.update_as_defined(subject, cases, "update of two plans"))


def ones(plan, prompts):
    """All edges."""
    return all_kept(plan, len(prompts))


@st.composite
def chain_plans(draw):
    """Chains from one initial state a root, some steps deterministic, with a trained fraction."""
    steps = draw(st.integers(2, 7))
    output = draw(st.sampled_from(list(LeafOutput)))
    last = steps - 1 if output is LeafOutput.DENOISED else steps
    noisy = {0} | draw(st.sets(st.integers(0, last - 1)))
    group = draw(st.integers(1, 3))
    return tree_plan(
        steps,
        SDE,
        splits=(0,) if group > 1 else (),
        branching=group,
        sde_steps=sorted(noisy),
        roots=draw(st.integers(1, 3)),
        output=output,
        trained_fraction=draw(st.sampled_from([0.6, 0.3, 0.5, 1 / 3, 0.99, 1.0])),
    )


@clause("PLAN-7", "NOISE-4")
@given(plan=chain_plans(), prompts=strategies.prompt_lists(), seed=strategies.seeds, iteration=st.integers(0, 99))
def test_each_chain_trains_a_subset_of_its_own(subject, judge, plan, prompts, seed, iteration):
    judge(checks.subset_findings(subject, plan, prompts, seed, iteration))
