"""Operation checks of the objective: off policy, with KL, over several trees."""

import math
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.conformance.checks.base import (
    Subject,
    UnsupportedError,
    each_supported,
    expect,
    expect_close,
    operation_check,
)
from branchgrpo.conformance.checks.fixtures import (
    FLOW,
    all_edges,
    alternating,
    network,
    prompts_of,
    rolled,
    small_plan,
    small_tree,
)
from branchgrpo.conformance.clauses import clause
from branchgrpo.conformance.subjects import condition_for
from branchgrpo.reference.implementation import Levels, Masks, Trace
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.options import Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import VelocityModel
from branchgrpo.reference.types import LeafOutput, Reduction

WIDE, SAME = Objective(clip_low=0.05, clip_high=0.1), Objective(clip_low=0.05, clip_high=0.05)


def value(
    subject: Subject,
    trace: Trace,
    options: Objective,
    advantages: Levels | None = None,
    kept: Masks | None = None,
    reference: VelocityModel | None = None,
) -> Float64[Tensor, ""]:
    """J of one trace under the policy network."""
    condition = condition_for(trace.prompts, torch.float64, subject.device)
    own, masks = advantages or alternating(trace), kept or all_edges(trace)
    implementation = subject.operation("objective")
    return implementation.objective(
        [trace], network(subject), condition, [own], [masks], options, Reduction.MEAN, reference
    )


def aged(trace: Trace, shift: float) -> Trace:
    """A trace whose old log-probabilities are shifted: every ratio is exp(shift) times what it was."""
    return replace(trace, log_probs=tuple(None if x is None else x - shift for x in trace.log_probs))


def trained_depths(plan: Plan) -> list[int]:
    """Child depths of the trainable steps."""
    return [step + 1 for step in plan.trainable_steps]


@operation_check
@clause("OBJ-2")
def the_surrogate_is_clipped_from_the_right_side(subject: Subject) -> None:
    """min(ρ A, clip(ρ) A): a large ratio is clipped where A > 0 only, a small one where A < 0 only."""
    trace = rolled(subject, small_plan(subject))
    each_supported(partial(compare_surrogate, subject, trace, options) for options in (WIDE, SAME))


def compare_surrogate(subject: Subject, trace: Trace, options: Objective) -> None:
    """J of a tree against the surrogate at ratios on both sides of one clip range."""
    advantages = alternating(trace)
    flat = torch.cat([advantages[depth] for depth in trained_depths(trace.plan)], dim=1)
    for shift in (0.3, 0.02, -0.02, -0.3):
        rho = math.exp(shift)
        clipped = min(max(rho, 1 - options.clip_low), 1 + options.clip_high)
        wanted = torch.minimum(rho * flat, clipped * flat).mean()
        expect_close(value(subject, aged(trace, shift), options), wanted, 1e-8, f"J at ρ = {rho:.3f}")


@operation_check
@clause("OBJ-1")
def the_ratio_is_new_over_old(subject: Subject) -> None:
    """ρ = p_θ/p_old: old log-probabilities that are lower by 0.02 raise J of positive advantages by e^0.02."""
    trace = rolled(subject, small_plan(subject))
    ones = tuple(torch.ones_like(level) for level in alternating(trace))
    found = value(subject, aged(trace, 0.02), SAME, ones)
    expect_close(found, torch.tensor(math.exp(0.02), dtype=torch.float64), 1e-8, "J of advantage 1 at ρ = e^0.02")


@operation_check
@clause("OBJ-4")
def depth_mean_weighs_depths_equally(subject: Subject) -> None:
    """``edge_mean`` is the mean over edges, ``depth_mean`` the mean within a depth and then over depths."""
    trace = rolled(subject, small_plan(subject))
    advantages = alternating(trace)
    levels = [advantages[depth] for depth in trained_depths(trace.plan)]
    by_edge = torch.cat(levels, dim=1).mean()
    by_depth = torch.stack([level.mean() for level in levels]).mean()
    expect_close(value(subject, trace, SAME), by_edge, 1e-8, "edge_mean at ρ = 1")
    expect_close(value(subject, trace, replace(SAME, reduction="depth_mean")), by_depth, 1e-8, "depth_mean at ρ = 1")


@operation_check
@clause("OBJ-3")
def edges_without_advantage_count(subject: Subject) -> None:
    """Edges with A = 0 stay in the mean."""
    trace = rolled(subject, small_tree())
    advantages = tuple(torch.where(level > 0.3, level, 0.0) for level in alternating(trace))
    wanted = torch.cat([advantages[depth] for depth in trained_depths(trace.plan)], dim=1).mean()
    expect_close(value(subject, trace, WIDE, advantages), wanted, 1e-8, "J with advantages of 0")


@operation_check
@clause("OBJ-5")
def the_kl_has_the_steps_std_and_a_gradient(subject: Subject) -> None:
    """β_KL times the mean of ‖μ − μ_ref‖²/(2 std²) is subtracted, std with √Δ, differentiable in the policy alone."""
    trace, policy, frozen = rolled(subject, small_plan(subject)), network(subject), network(subject, 0.8)
    condition = condition_for(trace.prompts, torch.float64, subject.device)
    zeros = tuple(torch.zeros_like(level) for level in alternating(trace))
    terms = []
    for step in trace.plan.trainable_steps:
        x = trace.states[step]
        own = condition.gather(torch.arange(2).repeat_interleave(x.shape[1]))
        sigma = torch.full((2 * x.shape[1],), trace.plan.sigmas[step], dtype=torch.float64, device=subject.device)
        transition = subject.operation("transition").transition
        with torch.no_grad():
            means = [
                transition(trace.plan, step, x.flatten(0, 1), m(x.flatten(0, 1), sigma, own))[0]
                for m in (policy, frozen)
            ]
        kl = ((means[0] - means[1]) ** 2 / (2 * float(trace.stds[step]) ** 2)).flatten(1).mean(dim=1)
        terms.append(kl.reshape(2, -1).repeat_interleave(trace.plan.branching[step], dim=1))
    options = replace(SAME, kl=0.7)
    wanted = -0.7 * torch.cat(terms, dim=1).mean()

    def kl_alone(options: Objective) -> Float64[Tensor, ""]:
        edges, objective = [all_edges(trace)], subject.operation("objective").objective
        return objective([trace], policy, condition, [zeros], edges, options, Reduction.MEAN, frozen)

    found = kl_alone(options)
    expect_close(found, wanted, 1e-8, "J of advantage 0 with KL")
    try:
        weighted = kl_alone(replace(options, edge_weights="std"))
    except UnsupportedError:
        weighted = found
    expect_close(weighted, wanted, 1e-8, "J of advantage 0 with KL and std weights, which the KL has not")
    gradients = torch.autograd.grad(found, [policy.outer, frozen.outer], allow_unused=True)
    expect(gradients[0] is not None and float(gradients[0].abs().max()) > 0, "the KL carries no gradient to the policy")
    expect(gradients[1] is None or float(gradients[1].abs().max()) == 0, "the KL trains the frozen policy")


@operation_check
@clause("OBJ-6")
def std_weights_have_mean_1_over_steps(subject: Subject) -> None:
    """Edge weights are the step's std over the mean of the distinct trained steps' stds, whatever their edges."""
    plan = tree_plan(5, FLOW, splits=(0, 2), branching=2, spread=1.0)
    trace = rolled(subject, plan)
    advantages = alternating(trace)
    stds = [float(trace.stds[step]) for step in plan.trainable_steps]
    mean = sum(stds) / len(stds)
    levels = [std / mean * advantages[depth] for std, depth in zip(stds, trained_depths(plan), strict=True)]
    found = value(subject, trace, replace(SAME, edge_weights="std"))
    expect_close(found, torch.cat(levels, dim=1).mean(), 1e-8, "J with std weights")


@operation_check
@clause("OBJ-7")
def j_is_the_mean_over_trees(subject: Subject) -> None:
    """J of several prompts is the mean of their own Js, however many edges each keeps."""
    trace = rolled(subject, small_plan(subject), prompts_of(3))
    advantages, masks = alternating(trace), all_edges(trace)
    masks[-2][0] = False
    condition = condition_for(trace.prompts, torch.float64, subject.device)
    implementation, parts = subject.operation("objective"), []
    for prompt in range(3):
        pick = slice(prompt, prompt + 1)
        alone = replace(
            trace,
            prompts=trace.prompts[pick],
            states=tuple(x[pick] for x in trace.states),
            means=tuple(x[pick] for x in trace.means),
            log_probs=tuple(None if x is None else x[pick] for x in trace.log_probs),
        )
        own, kept = tuple(a[pick] for a in advantages), tuple(m[pick] for m in masks)
        row = condition.gather(torch.tensor([prompt]))
        parts.append(
            implementation.objective([alone], network(subject), row, [own], [kept], SAME, Reduction.MEAN, None).detach()
        )
    wanted = torch.stack(parts).mean()
    expect_close(value(subject, trace, SAME, advantages, masks).detach(), wanted, 1e-8, "J of three prompts")


@operation_check
@clause("PRUNE-6")
def the_pruned_gradient_is_the_mean_of_the_kept(subject: Subject) -> None:
    """The gradient under masks is the mean of the unpruned gradients of the edges that stay."""
    trace = rolled(subject, small_plan(subject), prompts_of(1))
    condition = condition_for(trace.prompts, torch.float64, subject.device)
    policy, advantages = network(subject), alternating(trace)
    masks = all_edges(trace)
    masks[-2][0, 1:] = False
    masks[1][0, 0] = False

    def gradient(kept: Masks) -> Tensor:
        j = subject.operation("objective").objective(
            [trace], policy, condition, [advantages], [kept], SAME, Reduction.MEAN, None
        )
        return torch.cat([g.flatten() for g in torch.autograd.grad(j, [policy.inner, policy.outer])])

    single = []
    for step in trace.plan.trainable_steps:
        for column in masks[step][0].nonzero().flatten().tolist():
            only = tuple(torch.zeros_like(mask) for mask in masks)
            only[step][0, column] = True
            single.append(gradient(only))
    expect_close(gradient(masks), torch.stack(single).mean(dim=0), 1e-8, "gradient of the pruned tree")


@operation_check
@clause("PLAN-6")
def untrained_steps_stay_untrained(subject: Subject) -> None:
    """Steps outside the plan's trained steps do not enter J, under ``sample`` as under ``denoised``."""
    plan = small_tree(output=LeafOutput.SAMPLE, trained_steps=(1, 3))
    trace = rolled(subject, plan)
    advantages = alternating(trace)
    wanted = torch.cat([advantages[2], advantages[4]], dim=1).mean()
    expect_close(value(subject, trace, SAME, advantages), wanted, 1e-8, "J of the plan's trained steps")
