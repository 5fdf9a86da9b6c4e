"""The batched path against the reference: states, log-probabilities, tail, objective and its gradient."""

import pytest
import torch
from helpers_optimized import (
    SmallModel,
    all_close,
    close,
    condition_of,
    gradients,
    options_of,
    plans,
    preset_plan,
    prompts_of,
    rewards_of,
    same_objective,
    shapes_unchecked,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from branchgrpo.conformance.adapters.optimized import OptimizedImplementation
from branchgrpo.conformance.adapters.reference import ReferenceImplementation
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.implementation import Implementation, Masks
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import (
    DepthWindow,
    ExtremeB,
    Fusion,
    Normalization,
    Objective,
    ParentTop1,
    PruningRule,
)
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.presets import PRESETS, preset
from branchgrpo.reference.types import Reduction

TREES = [name for name in PRESETS if not isinstance(preset(name).sampler, PlanFamily)]
FAMILIES = [name for name in PRESETS if name not in TREES]
QUICK = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def pair(chunk: int | None = 5) -> tuple[Implementation, Implementation]:
    return ReferenceImplementation(), OptimizedImplementation(chunk=chunk)


def both(masks: Masks, others: Masks) -> Masks:
    return tuple(a & b for a, b in zip(masks, others, strict=True))


SLOW = {"branchgrpo-k4": [pytest.mark.slow]}
"""256 leaves: the reference alone takes several seconds."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in TREES])
@shapes_unchecked()
def test_every_preset_agrees_from_rollout_to_gradient(name: str) -> None:
    method, plan = preset(name), preset_plan(name, iteration=30)
    reference, optimized = pair(chunk=11)
    count = 1 if plan.roots * plan.leaves > 30 else 2
    model, frozen = SmallModel(1), SmallModel(2) if method.objective.kl > 0 else None
    prompts, condition, noise = prompts_of(count), condition_of(count), KeyedNoise(11)
    expected = reference.rollout(plan, model, prompts, condition, noise, **options_of(30, method.log_prob))
    found = optimized.rollout(plan, model, prompts, condition, noise, **options_of(30, method.log_prob))
    assert all_close(found.states, expected.states)
    assert all_close(found.means, expected.means)
    assert all_close(found.log_probs, expected.log_probs)
    assert close(found.stds, expected.stds)
    values = [i.fuse(expected, rewards_of(plan, count, 1, 4), method.fusion) for i in (reference, optimized)]
    assert all_close(values[1], values[0])
    advantages = [i.normalize(plan, values[0], [1.0], method.normalization) for i in (reference, optimized)]
    assert all_close(advantages[1], advantages[0])
    keys = [i.leaf_keys(plan, values[0], [1.0], method.normalization) for i in (reference, optimized)]
    assert torch.equal(keys[1], keys[0])
    kept = [i.prune(plan, keys[0], method.pruning, 30) for i in (reference, optimized)]
    subsets = [i.trained_subsets(plan, prompts, 9, 30) for i in (reference, optimized)]
    for mine, theirs in ((kept[1], kept[0]), (subsets[1], subsets[0])):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    moved = SmallModel(1)
    with torch.no_grad():
        moved.weight.mul_(1.02)
    arguments = ([advantages[0]], [both(kept[0], subsets[0])], method.objective, method.log_prob, frozen)
    values_j = [i.objective([expected], moved, condition, *arguments) for i in (reference, optimized)]
    assert same_objective(values_j[1], values_j[0], advantages[0])
    assert close(gradients(moved, values_j[1]), gradients(moved, values_j[0]))


def test_a_large_tree_agrees_with_shapes_checked() -> None:
    """As above; only the reference runs unchecked."""
    name = "branchgrpo-widpru"
    method, plan = preset(name), preset_plan(name)
    reference, optimized = pair(chunk=11)
    model, prompts, condition, noise = SmallModel(1), prompts_of(3), condition_of(3), KeyedNoise(11)
    options, rewards = options_of(0, method.log_prob), rewards_of(plan, 3, 2, 4)
    with shapes_unchecked():
        expected = reference.rollout(plan, model, prompts, condition, noise, **options)
        values = reference.fuse(expected, rewards, method.fusion)
        advantages = reference.normalize(plan, values, [1.0, 0.5], method.normalization)
        keys = reference.leaf_keys(plan, values, [1.0, 0.5], method.normalization)
        kept = reference.prune(plan, keys, method.pruning, 0)
    found = optimized.rollout(plan, model, prompts, condition, noise, **options)
    assert all_close(found.states, expected.states)
    assert all_close(found.log_probs, expected.log_probs)
    assert all_close(optimized.fuse(expected, rewards, method.fusion), values)
    assert all_close(optimized.normalize(plan, values, [1.0, 0.5], method.normalization), advantages)
    assert close(optimized.leaf_keys(plan, values, [1.0, 0.5], method.normalization), keys)
    assert all(torch.equal(a, b) for a, b in zip(optimized.prune(plan, keys, method.pruning, 0), kept, strict=True))
    with torch.no_grad():
        model.weight.mul_(1.02)
    arguments = ([expected], model, condition, [advantages], [kept], method.objective, method.log_prob, None)
    with shapes_unchecked():
        expected_j = reference.objective(*arguments)
    found_j = optimized.objective(*arguments)
    assert same_objective(found_j, expected_j, advantages)
    assert close(gradients(model, found_j), gradients(model, expected_j))


@shapes_unchecked()
@QUICK
@given(plan=plans(), reduction=st.sampled_from(list(Reduction)), chunk=st.sampled_from([None, 1, 3]))
def test_rollouts_of_random_plans_agree(plan: Plan, reduction: Reduction, chunk: int | None) -> None:
    reference, optimized = pair(chunk)
    model, prompts, condition, noise = SmallModel(1), prompts_of(2), condition_of(2), KeyedNoise(5)
    expected = reference.rollout(plan, model, prompts, condition, noise, **options_of(3, reduction))
    found = optimized.rollout(plan, model, prompts, condition, noise, **options_of(3, reduction))
    assert all_close(found.states, expected.states)
    assert all_close(found.means, expected.means)
    assert all_close(found.log_probs, expected.log_probs)


fusions = st.builds(
    Fusion,
    kind=st.sampled_from(["path_softmax", "child_softmax", "standardised"]),
    beta=st.sampled_from([0.0, 0.3, 1.0, 40.0]),
)
normalizations = st.builds(
    Normalization,
    mean_scope=st.sampled_from(["tree", "prompt"]),
    std_scope=st.sampled_from(["tree", "prompt", "batch"]),
    bessel=st.booleans(),
    eps=st.sampled_from([0.0, 1e-8, 1e-4]),
    clip=st.sampled_from([0.5, 5.0]),
    order=st.sampled_from(["normalize_then_sum", "sum_then_normalize"]),
)


@shapes_unchecked()
@QUICK
@given(
    plan=plans(),
    fusion=fusions,
    normalization=normalizations,
    models=st.integers(1, 2),
    ties=st.booleans(),
    seed=st.integers(0, 99),
)
def test_tails_of_random_plans_agree(
    plan: Plan, fusion: Fusion, normalization: Normalization, models: int, ties: bool, seed: int
) -> None:
    reference, optimized = pair()
    prompts, condition = prompts_of(2), condition_of(2)
    trace = reference.rollout(plan, SmallModel(1), prompts, condition, KeyedNoise(seed), **options_of())
    rewards = rewards_of(plan, 2, models, seed, ties=ties)
    weights = [1.0, 0.25][:models]
    values = [i.fuse(trace, rewards, fusion) for i in (reference, optimized)]
    assert all_close(values[1], values[0])
    advantages = [i.normalize(plan, values[0], weights, normalization) for i in (reference, optimized)]
    assert all_close(advantages[1], advantages[0])
    keys = [i.leaf_keys(plan, values[0], weights, normalization) for i in (reference, optimized)]
    assert close(keys[1], keys[0])
    rules: list[PruningRule] = [DepthWindow(start=1, size=1, period=2)]
    if plan.splits:
        rules += [ParentTop1(drop_split_edges=ties), ExtremeB(1 + seed % 3, drop_split_edges=not ties)]
    for iteration in (0, 2, 7):
        kept = [i.prune(plan, keys[0], rules[: 1 + iteration], iteration) for i in (reference, optimized)]
        assert all(torch.equal(a, b) for a, b in zip(kept[1], kept[0], strict=True))


objectives = st.builds(
    Objective,
    clip_low=st.sampled_from([1e-3, 0.2]),
    clip_high=st.sampled_from([1e-3, 0.3]),
    reduction=st.sampled_from(["edge_mean", "depth_mean"]),
    edge_weights=st.sampled_from(["uniform", "std"]),
    kl=st.sampled_from([0.0, 0.1]),
)


@shapes_unchecked()
@QUICK
@given(plan=plans(), options=objectives, reduction=st.sampled_from(list(Reduction)), seed=st.integers(0, 99))
def test_objectives_of_random_plans_agree(plan: Plan, options: Objective, reduction: Reduction, seed: int) -> None:
    assume(plan.trainable_steps)
    reference, optimized = pair()
    prompts, condition, model = prompts_of(2), condition_of(2), SmallModel(1)
    trace = reference.rollout(plan, model, prompts, condition, KeyedNoise(seed), **options_of(0, reduction))
    generator = torch.Generator().manual_seed(seed)
    levels = tuple(torch.randn(s.shape[:2], generator=generator, dtype=torch.float64) for s in trace.states)
    kept = tuple(torch.rand(s.shape[:2], generator=generator) < 0.7 for s in trace.states[1:])
    kept[plan.trainable_steps[0]].fill_(True)
    with torch.no_grad():
        model.weight.mul_(1.01)
    frozen = SmallModel(2) if options.kl > 0 else None
    arguments = ([trace], model, condition, [levels], [kept], options, reduction, frozen)
    expected, found = reference.objective(*arguments), optimized.objective(*arguments)
    assert same_objective(found, expected, levels)
    assert close(gradients(model, found), gradients(model, expected))


@pytest.mark.parametrize("name", FAMILIES)
@shapes_unchecked()
def test_every_family_agrees_and_makes_the_counted_calls(name: str) -> None:
    from branchgrpo.reference.counts import count

    method, family = preset(name), preset(name).sampler
    assert isinstance(family, PlanFamily)
    reference, optimized = pair(chunk=17)
    model, prompts, condition, noise = SmallModel(1), prompts_of(1), condition_of(1), KeyedNoise(2)
    found = optimized.singular_rollout(family, model, prompts, condition, noise, **options_of(4))
    assert sum(model.calls) == count(method).denoiser_calls
    expected = reference.singular_rollout(family, model, prompts, condition, noise, **options_of(4))
    assert list(found) == list(expected)
    for member in expected:
        assert all_close(found[member].states, expected[member].states)
        assert all_close(found[member].log_probs, expected[member].log_probs)
    first = family.granularities[0]
    traces, levels, masks = [], [], []
    for k in family.ks:
        values = {}
        for granularity in family.granularities:
            plan = family.member(k, granularity)
            rewards = rewards_of(plan, 1, 2, 10 * k + granularity)
            values[granularity] = reference.fuse(expected[k, granularity], rewards, method.fusion)
        arguments = (family, k, values, [1.0, 0.5], method.normalization)
        advantages = [i.granular_advantages(*arguments) for i in (reference, optimized)]
        assert close(advantages[1], advantages[0])
        trace = expected[k, first]
        traces.append(trace)
        levels.append(
            tuple(advantages[0] if d == k + 1 else torch.zeros_like(s[..., 0, 0]) for d, s in enumerate(trace.states))
        )
        masks.append(tuple(torch.ones(s.shape[:2], dtype=torch.bool) for s in trace.states[1:]))
    with torch.no_grad():
        model.weight.mul_(1.01)
    update = (traces, model, condition, levels, masks, method.objective, method.log_prob, None)
    values_j = [i.objective(*update) for i in (reference, optimized)]
    assert same_objective(values_j[1], values_j[0], levels[0])
    assert close(gradients(model, values_j[1]), gradients(model, values_j[0]))
