"""The clipped objective over kept edges, parent by parent (spec: objective)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from branchgrpo.optimized.denoiser import FiniteLog, Place, velocity
from branchgrpo.optimized.log_probability import log_density
from branchgrpo.optimized.table import Table
from branchgrpo.optimized.tree import Tree
from branchgrpo.optimized.work import Work
from branchgrpo.reference.options import Objective
from branchgrpo.reference.protocols import Condition, VelocityModel
from branchgrpo.reference.types import Reduction


def clipped_surrogate(
    rho: Float64[Tensor, "edges"], advantage: Float64[Tensor, "edges"], low: float, high: float
) -> Float64[Tensor, "edges"]:
    """min(ρ A, clip(ρ, 1 − ε_lo, 1 + ε_hi) A).

    Clause: OBJ-2.  Source: PPO (arXiv 1707.06347) Eq. 7; BranchGRPO Eq. 9; G²RPO Eq. 7.
    """
    return torch.minimum(rho * advantage, rho.clamp(1.0 - low, 1.0 + high) * advantage)


def is_clipped(
    rho: Float64[Tensor, "edges"], advantage: Float64[Tensor, "edges"], low: float, high: float
) -> Bool[Tensor, "edges"]:
    """Where the surrogate does not change with ρ: a ratio beyond the range on the side that the advantage favours."""
    return torch.where(advantage > 0.0, rho > 1.0 + high, rho < 1.0 - low)


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


def stored_states(trees: Sequence[Tree], batch: Sequence[Work], *, children: bool) -> Float[Tensor, "items *latent"]:
    """The stored states of a batch's parents, or of its edges' children, on the arithmetic's device.

    Clause: ROLL-5.
    """
    states = []
    for work in batch:
        level = trees[work.tree].states[work.step + children].flatten(0, 1)
        index = work.edges if children else work.parents
        states.append(level.index_select(0, index.to(level.device, non_blocking=True)))
    joined = states[0] if len(states) == 1 else torch.cat(states)
    return joined.to(trees[0].device, non_blocking=True)


def parent_velocities(
    model: VelocityModel,
    x: Float[Tensor, "parents *latent"],
    trees: Sequence[Tree],
    batch: Sequence[Work],
    table: Table,
    condition: Condition,
    finite: FiniteLog,
) -> Float[Tensor, "parents *latent"]:
    """One call for the parents of a batch, whatever their steps and prompts.  Clause: ROLL-3, ERR-3."""
    v = velocity(model, x, table.sigmas, condition, batch[0].step)
    plans = [trees[work.tree].plan for work in batch]
    pairs = zip(plans, batch, strict=True)
    finite.record([Place(w.step, p.level_sizes[w.step], p.roots, w.parents) for p, w in pairs], v.detach())
    return v


@no_type_check
class Attached(torch.autograd.Function):
    """A value whose gradient is already known."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        """The value, as a function of ``v`` with the given gradient."""
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        """Chain rule."""
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None


@dataclass(frozen=True, eq=False)
class Means:
    """Transition means of a batch's parents, from which their children's log-probabilities and the gradient follow.

    Attributes:
        table: the batch's part of the table.
        mean: μ of every parent, in float64 (LOGP-5), but rounded as in the rollout.
        share: 1, or 1/D under the mean reduction.
    """

    table: Table
    mean: Float64[Tensor, "parents *latent"]
    share: float

    @classmethod
    def of(
        cls,
        table: Table,
        x: Float[Tensor, "parents *latent"],
        v: Float[Tensor, "parents *latent"],
        reduction: Reduction,
    ) -> "Means":
        """μ = α x + γ v.  Clause: KERN-2 … KERN-4."""
        shape, elements = (-1, *(1,) * (x.ndim - 1)), math.prod(x.shape[1:])
        mean = (table.alpha.reshape(shape) * x).add_(table.gamma.reshape(shape) * v)
        return cls(table, mean.double(), 1.0 if reduction is Reduction.SUM else 1.0 / elements)

    def offsets(self, children: Float[Tensor, "edges *latent"]) -> Float64[Tensor, "edges elements"]:
        """child − μ of every edge."""
        single = len(children) == len(self.mean)
        mean = self.mean if single else self.mean.index_select(0, self.table.owner)
        return (children - mean).flatten(1)

    def pulled(
        self, offsets: Float64[Tensor, "edges elements"], pull: Float64[Tensor, "edges"]
    ) -> Float64[Tensor, "parents elements"]:
        """Σ over a parent's edges of pull·(child − μ)·share/std²; overwrites the offsets."""
        scaled = offsets.mul_((pull * self.share / self.table.stds.square()).unsqueeze(1))
        if len(scaled) == len(self.mean):
            return scaled
        total = torch.zeros(len(self.mean), scaled.shape[1], dtype=scaled.dtype, device=scaled.device)
        return total.index_add_(0, self.table.owner, scaled)

    def velocity_gradient(
        self, mean_gradient: Float64[Tensor, "parents elements"], v: Float[Tensor, "parents *latent"]
    ) -> Float[Tensor, "parents *latent"]:
        """∂/∂v = γ·∂/∂μ."""
        return mean_gradient.mul_(self.table.gamma.unsqueeze(1)).to(v.dtype).reshape(v.shape)


@torch.no_grad()
def edge_terms(
    means: Means,
    fixed: Means | None,
    children: Float[Tensor, "edges *latent"],
    options: Objective,
    reduction: Reduction,
) -> tuple[Terms, Float64[Tensor, "parents elements"]]:
    """Σ over edges of coefficient·(w·surrogate − β_KL·KL), not differentiable, and its gradient by the parents' means.

    Clause: OBJ-1, OBJ-2, OBJ-4, OBJ-5, OBJ-6.  ∂ log p/∂μ = (child − μ)/std², ∂ KL/∂μ = (μ − μ_ref)/std², both reduced;
    the surrogate's slope in log ρ is ρ A, or 0 where it is clipped.
    """
    table, offsets = means.table, means.offsets(children)
    distance = torch.linalg.vector_norm(offsets, dim=1)
    rho = torch.exp(log_density(distance, table.stds, offsets.shape[1], reduction) - table.old_log_probs)
    value = torch.dot(table.weights, clipped_surrogate(rho, table.advantages, options.clip_low, options.clip_high))
    clipped = is_clipped(rho, table.advantages, options.clip_low, options.clip_high)
    slope = (table.weights * rho).mul_(table.advantages).masked_fill_(clipped, 0.0)
    gradient, kl = means.pulled(offsets, slope), torch.zeros((), dtype=torch.float64, device=value.device)
    if fixed is not None:
        apart = (fixed.mean - means.mean).flatten(1)
        pull = torch.zeros(len(apart), dtype=torch.float64, device=value.device)
        pull.index_add_(0, table.owner, table.coefficients * means.share / table.stds.square())
        kl = 0.5 * torch.dot(pull, apart.square().sum(dim=1))
        value = value - options.kl * kl
        gradient.add_(apart.mul_((options.kl * pull).unsqueeze(1)))
    return Terms(value, kl, rho), gradient


def batch_terms(
    trees: Sequence[Tree],
    policies: Policies,
    batch: Sequence[Work],
    table: Table,
    options: Objective,
    finite: FiniteLog,
) -> Terms:
    """A batch's part of J: one forward a parent for all its children, differentiable in the model's parameters.

    Clause: OBJ-1 … OBJ-6.  What the graph holds beside the model's own activations is the gradient by the velocities:
    one state a parent, however many edges leave it.

    Args:
        trees: all trees of the update.
        policies: models and conditions.
        batch: parents with their kept edges.
        table: the batch's part of the table.
        options: clip range, β_KL.
        finite: takes note of non-finite velocities.
    """
    reduction = trees[0].reduction
    x = stored_states(trees, batch, children=False).to(trees[0].dtype)
    condition = policies.condition.gather(table.rows)
    v = parent_velocities(policies.model, x, trees, batch, table, condition, finite)
    means, fixed = Means.of(table, x, v.detach(), reduction), None
    if policies.reference is not None:
        with torch.no_grad():
            v_ref = parent_velocities(policies.reference, x, trees, batch, table, condition, finite)
        fixed = Means.of(table, x, v_ref, reduction)
    terms, gradient = edge_terms(means, fixed, stored_states(trees, batch, children=True), options, reduction)
    value: Tensor = Attached.apply(v, terms.value, means.velocity_gradient(gradient, v))  # type: ignore[no-untyped-call]
    return Terms(value, terms.kl, terms.ratios)
