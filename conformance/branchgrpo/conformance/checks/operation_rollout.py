"""Operation checks of the rollout: what it asks of the model, of the noise, and of nothing else."""

import math

import numpy as np
import torch

from branchgrpo.conformance.checks.base import Subject, expect, expect_close, operation_check
from branchgrpo.conformance.checks.fixtures import (
    FLOW,
    LATENT,
    all_edges,
    draw_of,
    network,
    noise_of,
    prompts_of,
    rewards_of,
    rolled,
    sampling,
    small_plan,
    small_tree,
)
from branchgrpo.conformance.checks.limits import EXACT
from branchgrpo.conformance.clauses import clause
from branchgrpo.conformance.subjects import GuidedNetwork, Recorder, condition_for
from branchgrpo.reference.counts import count_family, count_plan
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.family_counts import anchor_calls
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import Fusion, Normalization, Objective
from branchgrpo.reference.protocols import Guidance, NoiseRole
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import LeafOutput, Reduction

OPEN = Objective(clip_low=0.999, clip_high=0.999)
SUBSET_ROLE = 3
"""Code of the role SUBSET in a key (NOISE-4)."""

HALF_A_UNIT = float(torch.finfo(torch.bfloat16).eps) / 2
"""Largest rounding error of a bf16 number in [1, 2)."""


@operation_check
@clause("ROLL-2")
def rollouts_repeat_and_leave_global_state_alone(subject: Subject) -> None:
    """The same arguments give the same rollout; global random state is neither read nor moved."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    plan = small_plan(subject)
    first = rolled(subject, plan)
    expect(torch.equal(before, torch.get_rng_state()), "a rollout moves torch's global random state")
    torch.manual_seed(2)
    second = rolled(subject, plan)
    for depth, (a, b) in enumerate(zip(first.states, second.states, strict=True)):
        expect(torch.equal(a, b), f"two equal calls give other states at depth {depth}")
        expect(not a.requires_grad, f"states of depth {depth} record a gradient")


@operation_check
@clause("ROLL-3")
def the_model_sees_the_plans_levels_and_each_parent_once(subject: Subject) -> None:
    """The model is called at exactly the plan's noise levels, once a parent; means follow from its velocities."""
    plan, model = small_plan(subject), network(subject)
    recorder = Recorder(model, Guidance())
    trace = rolled(subject, plan, model=recorder)
    wanted = count_plan(plan).denoiser_calls * 2
    expect(recorder.items == wanted, f"{recorder.items} model evaluations, {wanted} parents")
    levels = {float(sigma) for sigma in plan.sigmas[:-1]}
    expect(recorder.sigmas == levels, f"the model saw σ = {sorted(recorder.sigmas)}, the plan has {sorted(levels)}")
    condition = condition_for(trace.prompts, torch.float64, subject.device)
    for step in range(plan.steps):
        x = trace.states[step]
        own = condition.gather(torch.arange(2).repeat_interleave(x.shape[1]))
        sigma = torch.full((2 * x.shape[1],), plan.sigmas[step], dtype=torch.float64, device=subject.device)
        with torch.no_grad():
            v = model(x.flatten(0, 1), sigma, own)
            mean, _ = subject.operation("transition").transition(plan, step, x.flatten(0, 1), v)
        wide = mean.reshape(x.shape).repeat_interleave(plan.branching[step], dim=1)
        expect_close(trace.means[step], wide, 1e-10, f"means of step {step} from the parents' own velocities")


@operation_check
@clause("ROLL-4")
def guidance_is_the_same_in_rollout_and_update(subject: Subject) -> None:
    """Under classifier-free guidance the ratio of unchanged weights is 1 and gradients flow through both branches."""
    model = GuidedNetwork(math.prod(LATENT)).to(subject.device)
    trace = rolled(subject, small_plan(subject), model=model)
    condition = condition_for(trace.prompts, torch.float64, subject.device)
    ones = tuple(torch.ones(s.shape[:2], dtype=torch.float64, device=subject.device) for s in trace.states)
    implementation = subject.operation("objective")
    value = implementation.objective([trace], model, condition, [ones], [all_edges(trace)], OPEN, Reduction.MEAN, None)
    expect(
        abs(float(value.detach()) - 1) <= 1e-9,
        f"mean ratio {float(value.detach())} with unchanged weights and guidance",
    )
    expect(value.requires_grad, "the objective of a guided model carries no gradient")


@operation_check
@clause("ROLL-6")
def leaves_are_what_the_plan_hands_out(subject: Subject) -> None:
    """Under ``denoised`` a leaf is x̂⁰ of the last step, under ``sample`` it is the noisy child."""
    for output in LeafOutput:
        plan = small_plan(subject, output=output)
        trace = rolled(subject, plan)
        noisy = bool((trace.states[-1] != trace.means[-1]).any())
        expect(noisy == (output is LeafOutput.SAMPLE), f"leaves under {output.value} have noise: {noisy}")
        expect((trace.log_probs[-1] is None) == (not noisy), f"last log-probabilities under {output.value}")
        if output is LeafOutput.DENOISED:
            condition = condition_for(trace.prompts, torch.float64, subject.device)
            x, sigma = trace.states[-2], plan.sigmas[-2]
            own = condition.gather(torch.arange(2).repeat_interleave(x.shape[1]))
            levels = torch.full((2 * x.shape[1],), sigma, dtype=torch.float64, device=subject.device)
            with torch.no_grad():
                v = network(subject)(x.flatten(0, 1), levels, own)
            expect_close(trace.states[-1], x - sigma * v.reshape(x.shape), 1e-10, "x̂⁰ of the last step")


@operation_check
@clause("NOISE-4")
def prompts_keep_their_numbers_in_any_batch(subject: Subject) -> None:
    """A prompt's tree does not depend on the other prompts, on their order, or on when it is rolled out."""
    plan = small_tree(roots=2)
    three = prompts_of(3)
    together = rolled(subject, plan, three)
    shuffled = rolled(subject, plan, (three[2], three[0], three[1]))
    alone = rolled(subject, plan, (three[1],))
    later = rolled(subject, plan, three, iteration=1)
    for depth, states in enumerate(together.states):
        expect_close(shuffled.states[depth][1], states[0], 1e-10, f"states of depth {depth} in another prompt order")
        expect_close(alone.states[depth][0], states[1], 1e-10, f"states of depth {depth} of a prompt by itself")
    expect(bool((later.states[0] != together.states[0]).all()), "another iteration starts from the same noise")


@operation_check
@clause("NOISE-3")
def children_have_the_noise_of_their_keys(subject: Subject) -> None:
    """A root is its key's draw, a child its mean plus std·ξ of the draws of its own and its parent's key."""
    trace = rolled(subject, small_plan(subject))
    expect_close(trace.states[0], draw_of(trace, NoiseRole.ROOT, 0), 1e-10, "initial states")
    for step in trace.plan.stochastic_steps:
        made = trace.means[step].cpu() + float(trace.stds[step]) * noise_of(trace, step)
        expect_close(trace.states[step + 1], made, 1e-10, f"children of step {step} from their keys' draws")


@operation_check
@clause("PLAN-9")
def one_split_at_step_0_is_flat_grpo(subject: Subject) -> None:
    """With one split at step 0 and s = ∞ each chain has one value, one advantage: its leaf's z-score."""
    plan = tree_plan(5, FLOW, splits=(0,), branching=4)
    trace = rolled(subject, plan)
    rewards = rewards_of(trace)
    for beta in (0.0, 1.0, 30.0):
        values = subject.operation("fuse").fuse(trace, rewards, Fusion(beta=beta))
        advantages = subject.operation("normalize").normalize(plan, values, (1.0,), Normalization())
        group = rewards[..., 0]
        scores = (group - group.mean(dim=1, keepdim=True)) / (group.std(dim=1, keepdim=True) + 1e-8)
        for depth in range(1, plan.steps + 1):
            expect_close(values[depth], rewards, EXACT, f"values of depth {depth} at β = {beta}")
            expect_close(advantages[depth], scores, 1e-9, f"advantages of depth {depth} at β = {beta}")


@operation_check
@clause("SING-4")
def families_call_equal_inputs_once(subject: Subject) -> None:
    """A family costs one call an anchor state and the distinct calls of the continuations."""
    family = PlanFamily(shifted_schedule(8), FLOW, (0, 1, 3), 3, (1, 2, 3))
    recorder, prompts = Recorder(network(subject), Guidance()), prompts_of(2)
    condition = condition_for(prompts, torch.float64, subject.device)
    implementation = subject.operation("singular_rollout")
    implementation.singular_rollout(family, recorder, prompts, condition, KeyedNoise(3), **sampling())
    calls = count_family(family).denoiser_calls
    stopped, whole = 2 * calls, 2 * (calls + family.steps - anchor_calls(family))
    what = f"{recorder.items} model evaluations, not {stopped}, or {whole} with the anchor called to its end"
    expect(recorder.items in {stopped, whole}, what)


@operation_check
@clause("SING-1")
def members_are_integrated_at_their_levels(subject: Subject) -> None:
    """Every step of a member but step k is an Euler step between the levels of its plan, whatever the anchor."""
    singular, prompts, model = subject.operation("singular_rollout"), prompts_of(2), network(subject)
    condition = condition_for(prompts, torch.float64, subject.device)
    for anchor in ("start", "end"):
        family = PlanFamily(shifted_schedule(8), FLOW, (0, 2), 3, (1, 3), anchor)
        traces = singular.singular_rollout(family, model, prompts, condition, KeyedNoise(3), **sampling())
        for k, granularity in family.members():
            trace, plan, where = traces[k, granularity], family.member(k, granularity), f"member ({k}, {granularity})"
            expect(trace.plan == plan, f"{where}, anchored at the {anchor}: another plan than the family's")
            for step in set(range(plan.steps)) - {k}:
                x = trace.states[step]
                own = condition.gather(torch.arange(2).repeat_interleave(x.shape[1]))
                sigma = torch.full((2 * x.shape[1],), plan.sigmas[step], dtype=torch.float64, device=subject.device)
                with torch.no_grad():
                    v = model(x.flatten(0, 1), sigma, own).reshape(x.shape)
                what = f"means of step {step} of {where}, anchored at the {anchor}"
                expect_close(trace.means[step], x - plan.deltas[step] * v, 1e-10, what)


@operation_check
@clause("GRAN-6")
def one_granularity_is_one_split(subject: Subject) -> None:
    """With Λ = {1} the member of k has the states and advantages of the plan with one split at k."""
    family = PlanFamily(shifted_schedule(6), FLOW, (0, 2), 3)
    prompts = prompts_of(2)
    condition = condition_for(prompts, torch.float64, subject.device)
    singular = subject.operation("singular_rollout")
    traces = singular.singular_rollout(family, network(subject), prompts, condition, KeyedNoise(3), **sampling())
    for k in family.ks:
        plan = tree_plan(6, FLOW, splits=(k,), branching=3, sde_steps=())
        alone = rolled(subject, plan, prompts)
        for depth, states in enumerate(alone.states):
            expect_close(traces[k, 1].states[depth], states, 1e-10, f"states of depth {depth} of the member of k = {k}")
        values = subject.operation("fuse").fuse(alone, rewards_of(alone), Fusion())
        wanted = subject.operation("normalize").normalize(plan, values, (1.0,), Normalization())[k + 1]
        own = {1: subject.operation("fuse").fuse(traces[k, 1], rewards_of(traces[k, 1]), Fusion())}
        found = subject.operation("granular_advantages").granular_advantages(family, k, own, (1.0,), Normalization())
        expect_close(found, wanted, 1e-9, f"advantages of the member of k = {k}")


@operation_check
@clause("GRAN-5")
def terms_of_opposite_sign_are_not_clipped(subject: Subject) -> None:
    """Scores of two granularities with opposite signs cancel before the clip, however tight it is."""
    family = PlanFamily(shifted_schedule(8), FLOW, (0,), 4, (1, 2))
    rising = torch.tensor([[0.0, 1.0, 2.0, 7.0]], dtype=torch.float64, device=subject.device)
    falling = torch.tensor([[0.0, 4.0, -1.0, -2.0]], dtype=torch.float64, device=subject.device)
    values = {}
    for granularity, own in ((1, rising), (2, falling)):
        sizes = family.member(0, granularity).level_sizes
        values[granularity] = tuple((own if n == 4 else own.mean(dim=1, keepdim=True)).unsqueeze(-1) for n in sizes)
    implementation, clip = subject.operation("granular_advantages"), 0.2
    options = Normalization(eps=0.0, clip=clip)
    found = implementation.granular_advantages(family, 0, values, (1.0,), options)
    scores = [(own - own.mean()) / own.std() for own in (rising, falling)]
    expect_close(found, (scores[0] + scores[1]).clamp(-clip, clip), 1e-9, "clipped sum of scores of opposite sign")


@operation_check
@clause("PLAN-7")
def subsets_are_those_of_the_key(subject: Subject) -> None:
    """A chain's subset is the one that Philox chooses for its key; a prompt by itself has the same ones."""
    plan = tree_plan(9, FLOW, splits=(0,), branching=6, roots=2, trained_fraction=0.5)
    implementation, prompts = subject.operation("trained_subsets"), prompts_of(3)
    masks = implementation.trained_subsets(plan, prompts, 5, 0)
    alone = implementation.trained_subsets(plan, prompts[1:2], 5, 0)
    other = implementation.trained_subsets(plan, prompts, 5, 1)
    chains = [(prompt, root, leaf) for prompt in prompts for root in range(2) for leaf in range(plan.leaves)]
    for at, (prompt, root, leaf) in enumerate(chains):
        counter = np.array([0, prompt.id, (SUBSET_ROLE << 56) + (plan.steps << 32) + root, leaf], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(key=np.array([5, 0], dtype=np.uint64), counter=counter))
        size = int(plan.trained_fraction * len(plan.trainable_steps))
        wanted = set(generator.choice(plan.trainable_steps, size=size, replace=False).tolist())
        found = {step for step in plan.trainable_steps if bool(masks[step].flatten()[at])}
        expect(found == wanted, f"leaf {leaf} of prompt {prompt.id} trains {sorted(found)}, its key {sorted(wanted)}")
    for step in plan.trainable_steps:
        expect(torch.equal(masks[step][1:2], alone[step]), f"subsets of a prompt by itself differ at step {step}")
    moved = any(bool((masks[step] != other[step]).any()) for step in plan.trainable_steps)
    expect(moved, "another iteration trains the same subsets")


@operation_check
@clause("ROLL-5")
def a_rounded_state_is_what_everything_reads(subject: Subject) -> None:
    """With bf16 storage the next velocity, and with it the next mean, reads the rounded state."""
    plan = small_plan(subject)
    trace = rolled(subject, plan, storage_dtype=torch.bfloat16)
    condition = condition_for(trace.prompts, torch.float64, subject.device)
    for step in range(plan.steps):
        x = trace.states[step].double()
        own = condition.gather(torch.arange(2).repeat_interleave(x.shape[1]))
        sigma = torch.full((2 * x.shape[1],), plan.sigmas[step], dtype=torch.float64, device=subject.device)
        with torch.no_grad():
            v = network(subject)(x.flatten(0, 1), sigma, own)
            mean, _ = subject.operation("transition").transition(plan, step, x.flatten(0, 1), v)
        wide = mean.reshape(x.shape).repeat_interleave(plan.branching[step], dim=1)
        expect_close(trace.means[step], wide, 1e-10, f"means of step {step} from the rounded states")


@operation_check
@clause("ROLL-5")
def states_are_rounded_once(subject: Subject) -> None:
    """A child kept in bf16 is within half a unit of mean + std·ξ: nothing was rounded on the way to it.

    std·ξ is that of the same rollout kept in float64, whose noise has the same keys.
    """
    plan = small_plan(subject)
    exact, trace = rolled(subject, plan), rolled(subject, plan, storage_dtype=torch.bfloat16)
    for step in plan.stochastic_steps:
        displacement = exact.states[step + 1] - exact.means[step]
        made = (trace.means[step].double() + displacement).cpu()
        half = torch.ldexp(torch.ones_like(made), torch.frexp(made).exponent - 1) * HALF_A_UNIT
        worst = float(((trace.states[step + 1].double().cpu() - made).abs() / half).max())
        expect(worst <= 1.01, f"children of step {step}: {worst:.3g} half units of bf16 from mean + std·ξ, at most 1")
