"""The clipped objective over kept edges, parent by parent (spec: objective)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from branchgrpo.optimized.denoiser import FiniteLog, Place, velocity
from branchgrpo.optimized.kernels import step_coefficients
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


@dataclass(frozen=True, eq=False)
class Edges:
    """The kept edges of a batch, all steps in one row of arrays on the arithmetic's device.

    Attributes:
        owner: position of every edge's parent in the batch.
        alpha, gamma: of every parent's step, in the arithmetic's dtype, shaped to multiply states.
        stds: of every edge.
        children: as stored.
        old_log_probs, advantages: of every edge.
        coefficients: in J; ``weights`` times the step's weight.
    """

    owner: Int64[Tensor, "edges"]
    alpha: Float[Tensor, "parents *ones"]
    gamma: Float[Tensor, "parents *ones"]
    stds: Float64[Tensor, "edges"]
    children: Float[Tensor, "edges *latent"]
    old_log_probs: Float64[Tensor, "edges"]
    advantages: Float64[Tensor, "edges"]
    coefficients: Float64[Tensor, "edges"]
    weights: Float64[Tensor, "edges"]

    def means(
        self, x: Float[Tensor, "parents *latent"], v: Float[Tensor, "parents *latent"]
    ) -> Float[Tensor, "edges *latent"]:
        """Transition mean of every edge.  Clause: KERN-2 … KERN-4."""
        return (self.alpha * x + self.gamma * v).index_select(0, self.owner)


def batch_edges(
    trees: Sequence[Tree],
    advantages: Sequence[Levels],
    batch: Sequence[Work],
    weights: Mapping[int, float],
    x: Float[Tensor, "parents *latent"],
) -> Edges:
    """Gather a batch's edges from the trees.  Clause: OBJ-1, OBJ-3, LOGP-3."""
    rows: dict[str, list[Tensor]] = {name: [] for name in ("child", "old", "advantage")}
    steps, first, owners = [step_coefficients(trees[w.tree].plan, w.step) for w in batch], 0, []
    for work in batch:
        tree, old = trees[work.tree], trees[work.tree].log_probs[work.step]
        assert old is not None, "a trained step has log-probabilities"
        states = tree.states[work.step + 1].flatten(0, 1)
        rows["child"].append(states[work.edges].to(x.device, non_blocking=True))
        rows["old"].append(old.flatten()[work.edges.to(old.device, non_blocking=True)].to(x.device))
        rows["advantage"].append(advantages[work.tree][work.step + 1].flatten()[work.edges])
        owners.append(work.owner + first)
        first += len(work.parents)
    parents = torch.tensor([len(w.parents) for w in batch])
    numbers = [(s.alpha, s.gamma, s.std, weights[w.step]) for s, w in zip(steps, batch, strict=True)]
    table = torch.tensor(numbers, dtype=torch.float64)
    alpha, gamma, std, weight = table.repeat_interleave(parents, dim=0, output_size=first).unbind(1)
    owner, coefficient = torch.cat(owners), torch.cat([w.coefficient for w in batch])
    shape = (-1, *(1,) * (x.ndim - 1))
    placed = [
        t.to(x.device, non_blocking=True)
        for t in (owner, alpha.to(x.dtype), gamma.to(x.dtype), std[owner], torch.cat(rows["advantage"]), coefficient)
    ]
    return Edges(
        owner=placed[0],
        alpha=placed[1].reshape(shape),
        gamma=placed[2].reshape(shape),
        stds=placed[3],
        children=torch.cat(rows["child"]),
        old_log_probs=torch.cat(rows["old"]),
        advantages=placed[4],
        coefficients=placed[5],
        weights=placed[5] * weight[owner].to(x.device, non_blocking=True),
    )


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
    v = parent_velocities(policies.model, x, trees, batch, policies.condition, finite)
    edges = batch_edges(trees, advantages, batch, weights, x)
    mean = edges.means(x, v)
    reduction = trees[0].reduction
    rho = torch.exp(log_probability(edges.children, mean, edges.stds, reduction) - edges.old_log_probs)
    gain = clipped_surrogate(rho, edges.advantages, options.clip_low, options.clip_high)
    value = torch.dot(edges.weights, gain)
    kl = torch.zeros((), dtype=torch.float64, device=x.device)
    if policies.reference is not None:
        with torch.no_grad():
            fixed = parent_velocities(policies.reference, x, trees, batch, policies.condition, finite)
            mean_ref = edges.means(x, fixed)
        part = torch.dot(edges.coefficients, gaussian_kl(mean, mean_ref, edges.stds, reduction))
        value, kl = value - options.kl * part, part.detach()
    return Terms(value, kl, rho.detach())
