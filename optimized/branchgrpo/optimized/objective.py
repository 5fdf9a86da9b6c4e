"""The clipped objective over kept edges, parent by parent (spec: objective)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.optimized.denoiser import FiniteLog, Place, velocity
from branchgrpo.optimized.kernels import step_coefficients, transition_mean
from branchgrpo.optimized.log_probability import gaussian_kl, log_probability
from branchgrpo.optimized.tree import Levels, Tree
from branchgrpo.optimized.work import Work
from branchgrpo.reference.options import Objective
from branchgrpo.reference.protocols import Condition, VelocityModel


def clipped_surrogate(
    rho: Float64[Tensor, "edges"], advantage: Float64[Tensor, "edges"], low: float, high: float
) -> Float64[Tensor, "edges"]:
    """min(ρ A, clip(ρ, 1 − ε_lo, 1 + ε_hi) A).

    Clause: OBJ-2.  Source: PPO (arXiv 1707.06347) Eq. 7; BranchGRPO Eq. 9; G²RPO Eq. 7.
    """
    return torch.minimum(rho * advantage, rho.clamp(1.0 - low, 1.0 + high) * advantage)


@dataclass(frozen=True, eq=False)
class Terms:
    """What the edges of some parents contribute.

    Attributes:
        value: their part of J, differentiable.
        kl: their part of the mean KL to the frozen reference; 0 without one.
        ratios: ρ of every edge, detached.
    """

    value: Float64[Tensor, ""]
    kl: Float64[Tensor, ""]
    ratios: Float64[Tensor, "edges"]


@dataclass(frozen=True, eq=False)
class Policies:
    """The trained model, the frozen reference (if the objective has a KL term) and the prompts' conditions."""

    model: VelocityModel
    reference: VelocityModel | None
    condition: Condition


def parent_states(trees: Sequence[Tree], batch: Sequence[Work]) -> Float[Tensor, "parents *latent"]:
    """The stored states of a batch's parents, in the dtype and on the device of the arithmetic.  Clause: ROLL-5."""
    first = trees[0]
    states = [trees[w.tree].states[w.step].flatten(0, 1)[w.parents] for w in batch]
    return torch.cat([state.to(first.device, first.dtype, non_blocking=True) for state in states])


def parent_velocities(
    model: VelocityModel,
    x: Float[Tensor, "parents *latent"],
    trees: Sequence[Tree],
    batch: Sequence[Work],
    condition: Condition,
    finite: FiniteLog,
) -> Float[Tensor, "parents *latent"]:
    """One call for the parents of a batch, whatever their steps and prompts.  Clause: ROLL-3, ERR-3."""
    plans = [trees[w.tree].plan for w in batch]
    pairs = list(zip(plans, batch, strict=True))
    sigma = torch.cat(
        [torch.full((len(w.parents),), p.sigmas[w.step], dtype=x.dtype, device=x.device) for p, w in pairs]
    )
    rows = torch.cat([w.parents // (p.roots * p.level_sizes[w.step]) for p, w in pairs]).to(x.device)
    v = velocity(model, x, sigma, condition.gather(rows), batch[0].step)
    finite.record([Place(w.step, p.level_sizes[w.step], p.roots, w.parents) for p, w in pairs], v.detach())
    return v


def batch_terms(
    trees: Sequence[Tree],
    policies: Policies,
    advantages: Sequence[Levels],
    batch: Sequence[Work],
    weights: Mapping[int, float],
    options: Objective,
    finite: FiniteLog,
) -> Terms:
    """Σ over a batch's edges of coefficient·(w·surrogate − β_KL·KL): one forward a parent for all its children.

    Clause: OBJ-1, OBJ-2, OBJ-4, OBJ-5, OBJ-6.

    Args:
        trees: all trees of the update.
        policies: models and conditions.
        advantages: for every tree A of every node.
        batch: parents with their kept edges and the edges' coefficients in J.
        weights: W of every trained step.
        options: clip range, β_KL.
        finite: takes note of non-finite velocities.
    """
    x = parent_states(trees, batch)
    sizes = [len(w.parents) for w in batch]
    v = parent_velocities(policies.model, x, trees, batch, policies.condition, finite)
    frozen: Sequence[Tensor | None] = [None] * len(batch)
    if policies.reference is not None:
        with torch.no_grad():
            fixed = parent_velocities(policies.reference, x, trees, batch, policies.condition, finite)
        frozen = torch.split(fixed, sizes)
    value = torch.zeros((), dtype=torch.float64, device=x.device)
    kl, ratios = value, []
    for work, x_part, v_part, v_frozen in zip(batch, torch.split(x, sizes), torch.split(v, sizes), frozen, strict=True):
        tree, levels = trees[work.tree], advantages[work.tree]
        step, old = step_coefficients(tree.plan, work.step), tree.log_probs[work.step]
        assert old is not None, "a trained step has log-probabilities"
        edges, owner, coefficient = (
            t.to(x.device, non_blocking=True) for t in (work.edges, work.owner, work.coefficient)
        )
        mean = transition_mean(x_part, v_part, step).index_select(0, owner)
        child = tree.states[work.step + 1].flatten(0, 1)[work.edges].to(x.device, non_blocking=True)
        log_prob = log_probability(child, mean, step.std, tree.reduction)
        rho = torch.exp(log_prob - old.flatten()[edges.to(old.device)].to(x.device))
        advantage = levels[work.step + 1].flatten()[work.edges].to(x.device, non_blocking=True)
        gain = clipped_surrogate(rho, advantage, options.clip_low, options.clip_high)
        value = value + (coefficient * gain).sum() * weights[work.step]
        if v_frozen is not None:
            mean_ref = transition_mean(x_part, v_frozen, step).index_select(0, owner)
            part = (coefficient * gaussian_kl(mean, mean_ref, step.std, tree.reduction)).sum()
            value, kl = value - options.kl * part, kl + part.detach()
        ratios.append(rho.detach())
    return Terms(value, kl, torch.cat(ratios))
