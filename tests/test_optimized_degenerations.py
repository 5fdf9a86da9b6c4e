"""Where two methods are one: BranchGRPO with one split at step 0 is flat GRPO; G²RPO with Λ = {1} is a plan."""

import math

import pytest
import torch
from helpers_optimized import (
    LATENT,
    SmallModel,
    all_close,
    close,
    condition_of,
    gradients,
    options_of,
    prompts_of,
    rewards_of,
    same_objective,
    shapes_unchecked,
)
from torch import Tensor

from branchgrpo.conformance.adapters.optimized import OptimizedImplementation
from branchgrpo.conformance.adapters.reference import ReferenceImplementation
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.implementation import Implementation
from branchgrpo.reference.kernels import transition
from branchgrpo.reference.keys import keyed_generator
from branchgrpo.reference.log_probability import gaussian_log_density
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import Fusion, Normalization, Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.presets import branchgrpo
from branchgrpo.reference.protocols import NoiseRole, TensorCondition
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import Kernel, KernelKind, Reduction

BOTH = pytest.mark.parametrize(
    "implementation",
    [ReferenceImplementation(), OptimizedImplementation(chunk=5)],
    ids=["reference", "optimized"],
)
STEPS, GROUP, SEED, ITERATION = 5, 6, 3, 2


def draw(role: NoiseRole, prompt: int, depth: int = 0, node: int = 0) -> Tensor:
    return torch.from_numpy(keyed_generator(SEED, ITERATION, role, prompt, 0, depth, node).standard_normal(LATENT))


def flat_chain(plan: Plan, model: SmallModel, condition: TensorCondition, prompt: int, chain: int) -> tuple[list, list]:
    """States and log-probabilities of one chain of flat GRPO, sampled by itself from the group's shared noise."""
    x = draw(NoiseRole.ROOT, prompt)
    states, log_probs = [x], []
    for step in range(plan.steps):
        v = model(x[None], torch.tensor([plan.sigmas[step]], dtype=torch.float64), condition)[0]
        mean, std = transition(plan, step, x, v)
        x = mean + std * draw(NoiseRole.PRIVATE, prompt, step + 1, chain) if std > 0 else mean
        states.append(x)
        log_probs.append(gaussian_log_density(x, mean, std, Reduction.SUM) if std > 0 else None)
    return states, log_probs


@BOTH
@shapes_unchecked()
def test_one_split_at_step_0_grows_the_chains_of_flat_grpo(implementation: Implementation) -> None:
    plan = branchgrpo("flat", steps=STEPS, splits=(0,), branching=GROUP, spread=math.inf).sampler
    assert isinstance(plan, Plan)
    model, prompts, condition = SmallModel(1), prompts_of(2), condition_of(2)
    options = options_of(ITERATION, Reduction.SUM)
    trace = implementation.rollout(plan, model, prompts, condition, KeyedNoise(SEED), **options)
    with torch.no_grad():
        for row, prompt in enumerate(prompts):
            own = condition.gather(torch.tensor([row]))
            for chain in range(GROUP):
                states, log_probs = flat_chain(plan, model, own, prompt.id, chain)
                assert close(trace.states[0][row, 0], states[0])
                for depth in range(1, STEPS + 1):
                    assert close(trace.states[depth][row, chain], states[depth])
                    found, expected = trace.log_probs[depth - 1], log_probs[depth - 1]
                    assert (found is None) == (expected is None)
                    assert found is None or close(found[row, chain], expected)


@BOTH
@pytest.mark.parametrize("beta", [0.0, 1.0, 50.0])
@pytest.mark.parametrize("kind", ["path_softmax", "child_softmax", "standardised"])
@shapes_unchecked()
def test_one_split_at_step_0_has_the_advantages_of_flat_grpo(
    implementation: Implementation, beta: float, kind: str
) -> None:
    plan = branchgrpo("flat", steps=STEPS, splits=(0,), branching=GROUP, spread=math.inf).sampler
    assert isinstance(plan, Plan)
    trace = implementation.rollout(
        plan, SmallModel(1), prompts_of(2), condition_of(2), KeyedNoise(SEED), **options_of(ITERATION)
    )
    rewards = rewards_of(plan, 2, 1, 8)
    options = Normalization()
    values = implementation.fuse(trace, rewards, Fusion(kind=kind, beta=beta))  # type: ignore[arg-type]
    advantages = implementation.normalize(plan, values, [1.0], options)
    flat = rewards[..., 0]
    expected = (flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + options.eps)
    assert torch.equal(advantages[0], torch.zeros(2, 1, dtype=torch.float64))
    for depth in range(1, STEPS + 1):
        assert close(values[depth], rewards)
        assert close(advantages[depth], expected)


@BOTH
@pytest.mark.parametrize("k", [0, 2, 4])
@shapes_unchecked()
def test_granularity_1_is_the_plan_with_one_split(implementation: Implementation, k: int) -> None:
    kernel, steps = Kernel(KernelKind.FLOW_SDE, 0.7), 6
    family = PlanFamily(shifted_schedule(steps), kernel, (0, 2, 4), GROUP, (1,))
    plan = tree_plan(steps, kernel, splits=(k,), branching=GROUP, sde_steps=())
    model, prompts, condition, noise = SmallModel(1), prompts_of(2), condition_of(2), KeyedNoise(SEED)
    options = options_of(ITERATION)
    member = implementation.singular_rollout(family, model, prompts, condition, noise, **options)[k, 1]
    trace = implementation.rollout(plan, model, prompts, condition, noise, **options)
    assert all_close(member.states, trace.states)
    assert all_close(member.log_probs, trace.log_probs)
    values = implementation.fuse(trace, rewards_of(plan, 2, 1, 8), Fusion())
    advantages = implementation.normalize(plan, values, [1.0], Normalization())
    granular = implementation.granular_advantages(family, k, {1: values}, [1.0], Normalization())
    assert close(granular, advantages[k + 1])
    moved = SmallModel(1)
    with torch.no_grad():
        moved.bias.mul_(1.1)
    kept = tuple(torch.ones(s.shape[:2], dtype=torch.bool) for s in trace.states[1:])
    tail = (moved, condition, [advantages], [kept], Objective(clip_low=0.1, clip_high=0.1), Reduction.MEAN, None)
    one, other = implementation.objective([member], *tail), implementation.objective([trace], *tail)
    assert same_objective(one, other, advantages)
    assert close(gradients(moved, one), gradients(moved, other))
