"""The objective as its clauses define it, on arrays and with the oracle's kernel coefficients: a third way to J."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from branchgrpo.oracle.chain import step_coefficients
from branchgrpo.properties.subject import offsets
from branchgrpo.reference.implementation import Levels, Masks, Trace
from branchgrpo.reference.options import Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import VelocityModel
from branchgrpo.reference.types import Reduction


def trained_masks(plan: Plan, kept: Masks) -> dict[int, Bool[Tensor, "trees _"]]:
    """E as a mask ``[trees, n]`` for every trainable step (OBJ-3)."""
    return {i: kept[i].cpu().reshape(-1, plan.level_sizes[i + 1]) for i in plan.trainable_steps}


def edge_coefficients(masks: Mapping[int, Tensor], reduction: str) -> dict[int, Float64[Tensor, "trees _"]]:
    """Weight of every edge's term in its tree: 1/|E|, or 1/(depths with an edge · edges of the depth) (OBJ-4)."""
    counts = {i: mask.sum(dim=1, keepdim=True).double() for i, mask in masks.items()}
    total = torch.stack(list(counts.values())).sum(dim=0)
    depths = torch.stack([count > 0 for count in counts.values()]).sum(dim=0).double()
    return {
        i: mask.double() / (total if reduction == "edge_mean" else depths * counts[i].clamp(min=1.0))
        for i, mask in masks.items()
    }


def trained_stds(masks: Mapping[int, Tensor], trace: Trace) -> dict[int, float]:
    """Std of every step with an edge in E (OBJ-6)."""
    return {i: float(trace.stds[i]) for i, mask in masks.items() if bool(mask.any())}


def factors_of(stds: Mapping[int, float], weighting: str) -> dict[int, float]:
    """w of every trained step: 1, or its std over the mean of the stds of the distinct steps of the update (OBJ-6)."""
    mean = sum(stds.values()) / len(stds)
    return {i: std / mean if weighting == "std" else 1.0 for i, std in stds.items()}


def step_factors(masks: Mapping[int, Tensor], trace: Trace, weighting: str) -> dict[int, float]:
    """w of every trained step of an update of one trace (OBJ-6)."""
    return factors_of(trained_stds(masks, trace), weighting)


def transition_mean(plan: Plan, step: int, x: Tensor, v: Tensor) -> Tensor:
    """A x + B v with the oracle's coefficients."""
    a, b, _ = step_coefficients(plan.kernels[step], plan.sigmas[step], plan.sigmas[step + 1], plan.sigmas[1])
    return a * x + b * v


def reduced(per_element: Tensor, reduction: Reduction) -> Tensor:
    """Sum or mean over the elements of ``[prompts, nodes, *latent]``, in float64."""
    flat = per_element.double().flatten(2)
    return flat.sum(dim=2) if reduction is Reduction.SUM else flat.mean(dim=2)


@dataclass(frozen=True, eq=False)
class StepTerms:
    """Ratio and KL of all edges of a step, ``[prompts, nodes]``."""

    ratio: Tensor
    kl: Tensor | None


def step_terms(
    trace: Trace, step: int, model: VelocityModel, reference_model: VelocityModel | None, reduction: Reduction
) -> StepTerms:
    """One model call for all parents of a step, whose dtype is that of the means."""
    plan, std = trace.plan, float(trace.stds[step])
    dtype, old = trace.means[step].dtype, trace.log_probs[step]
    x = trace.states[step].to(dtype)
    condition = offsets(trace.prompts, x.device)
    rows = torch.arange(x.shape[0], device=x.device).repeat_interleave(x.shape[1])
    flat = x.flatten(0, 1)
    sigma = torch.full((len(flat),), plan.sigmas[step], dtype=dtype, device=x.device)

    def means(policy: VelocityModel) -> Tensor:
        v = policy(flat, sigma, condition.gather(rows)).reshape(x.shape)
        return transition_mean(plan, step, x, v.to(dtype)).repeat_interleave(plan.branching[step], dim=1)

    mean = means(model)
    z = (trace.states[step + 1].double() - mean.double()) / std
    log_prob = reduced(-0.5 * z * z - math.log(std) - 0.5 * math.log(2.0 * math.pi), reduction)
    assert old is not None
    kl = None
    if reference_model is not None:
        with torch.no_grad():
            fixed = means(reference_model)
        kl = reduced((mean.double() - fixed.double()).square() / (2.0 * std * std), reduction)
    return StepTerms(torch.exp(log_prob - old), kl)


def defined_objective(
    trace: Trace,
    model: VelocityModel,
    advantages: Levels,
    kept: Masks,
    options: Objective,
    reduction: Reduction,
    reference_model: VelocityModel | None = None,
    factors: Mapping[int, float] | None = None,
) -> Float64[Tensor, ""]:
    """J of one trace, differentiable (OBJ-1 … OBJ-7); ``factors`` are those of the whole update if it has others."""
    plan = trace.plan
    masks = trained_masks(plan, kept)
    coefficients = edge_coefficients(masks, options.reduction)
    own = step_factors(masks, trace, options.edge_weights)
    total = torch.zeros((), dtype=torch.float64, device=trace.states[0].device)
    for step in own:
        factor = own[step] if factors is None else factors[step]
        terms = step_terms(trace, step, model, reference_model, reduction)
        advantage = advantages[step + 1].to(total.device)
        clipped = terms.ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
        gain = factor * torch.minimum(terms.ratio * advantage, clipped * advantage)
        if terms.kl is not None:
            gain = gain - options.kl * terms.kl
        total = total + (coefficients[step].reshape(gain.shape).to(total.device) * gain).sum()
    return total / (len(trace.prompts) * plan.roots)
