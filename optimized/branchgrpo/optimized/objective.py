"""The clipped objective over kept edges, parent by parent (spec: objective)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.optimized.denoiser import FiniteLog, Place, velocity
from branchgrpo.optimized.log_probability import log_density
from branchgrpo.optimized.table import Table
from branchgrpo.optimized.tree import Tree
from branchgrpo.optimized.work import Work
from branchgrpo.reference.errors import ModelError
from branchgrpo.reference.options import Objective
from branchgrpo.reference.protocols import Condition, VelocityModel
from branchgrpo.reference.types import Reduction


def clipped_surrogate(
    rho: Float64[Tensor, "edges"], advantage: Float64[Tensor, "edges"], low: float, high: float
) -> tuple[Float64[Tensor, "edges"], Float64[Tensor, "edges"]]:
    """min(ρ A, clip(ρ, 1 − ε_lo, 1 + ε_hi) A), and its slope in log ρ: ρ A, or 0 where the clipped one is smaller.

    Clause: OBJ-2.  Source: PPO (arXiv 1707.06347) Eq. 7; BranchGRPO Eq. 9; G²RPO Eq. 7.
    """
    free, clipped = rho * advantage, rho.clamp(1.0 - low, 1.0 + high) * advantage
    return torch.minimum(free, clipped), free.masked_fill(clipped < free, 0.0)


@dataclass(frozen=True, eq=False)
class Terms:
    """What the edges of some parents contribute.

    Attributes:
        value: their part of J.
        kl: their part of the mean KL to the frozen reference; None without one.
        ratios: ρ of every edge.
    """

    value: Float64[Tensor, ""]
    kl: Float64[Tensor, ""] | None
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
class Pullback:
    """Velocities of a batch, with their graph, and the gradient of its part of J by them."""

    v: Float[Tensor, "parents *latent"]
    gradient: Float[Tensor, "parents *latent"]

    def backward(self, factor: float) -> None:
        """Add ``factor`` times the gradient of the batch's part of J to the parameters; frees the graph.

        Raises:
            ModelError: velocities without a graph.
        """
        if not self.v.requires_grad:
            raise ModelError("velocity: requires_grad", False, "True: nothing in the model is trained")
        self.v.backward(self.gradient * factor)  # type: ignore[no-untyped-call]

    def attached(self, value: Float64[Tensor, ""]) -> Float64[Tensor, ""]:
        """The batch's part of J, differentiable."""
        found: Tensor = Attached.apply(self.v, value, self.gradient)  # type: ignore[no-untyped-call]
        return found


@dataclass(frozen=True, eq=False)
class Means:
    """Transition means of a batch's parents, from which their children's log-probabilities and the gradient follow.

    Attributes:
        table: the batch's part of the table.
        mean: μ of every parent, in float64 (LOGP-5), but rounded as in the rollout.
    """

    table: Table
    mean: Float64[Tensor, "parents *latent"]

    @classmethod
    def of(cls, table: Table, x: Float[Tensor, "parents *latent"], v: Float[Tensor, "parents *latent"]) -> "Means":
        """μ = α x + γ v.  Clause: KERN-2 … KERN-4."""
        shape = (-1, *(1,) * (x.ndim - 1))
        return cls(table, (table.alpha.reshape(shape) * x).add_(table.gamma.reshape(shape) * v).double())

    def offsets(self, children: Float[Tensor, "edges *latent"]) -> Float64[Tensor, "edges elements"]:
        """child − μ of every edge."""
        single = len(children) == len(self.mean)
        mean = self.mean if single else self.mean.index_select(0, self.table.owner)
        return (children - mean).flatten(1)

    def pulled(
        self, offsets: Float64[Tensor, "edges elements"], pull: Float64[Tensor, "edges"]
    ) -> Float64[Tensor, "parents elements"]:
        """Σ over a parent's edges of pull·(child − μ); overwrites the offsets."""
        scaled = offsets.mul_(pull.unsqueeze(1))
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
    """Σ over edges of coefficient·(w·surrogate − β_KL·KL), and its gradient by the parents' means.

    Clause: OBJ-1, OBJ-2, OBJ-4, OBJ-5, OBJ-6.  ∂ log p/∂μ = (child − μ)/std², ∂ KL/∂μ = (μ − μ_ref)/std², both reduced.
    """
    table, offsets = means.table, means.offsets(children)
    distance, elements = torch.linalg.vector_norm(offsets, dim=1), offsets.shape[1]
    density = log_density(distance, table.stds, table.normalisers, elements, reduction)
    rho = density.sub_(table.old_log_probs).exp_()
    surrogate, slope = clipped_surrogate(rho, table.advantages, options.clip_low, options.clip_high)
    value = torch.dot(table.weights, surrogate)
    gradient = means.pulled(offsets, slope.mul_(table.weights).mul_(table.precisions))
    if fixed is None:
        return Terms(value, None, rho), gradient
    apart = (fixed.mean - means.mean).flatten(1)
    pull = torch.zeros(len(apart), dtype=torch.float64, device=value.device)
    pull.index_add_(0, table.owner, table.coefficients * table.precisions)
    kl = 0.5 * torch.dot(pull, apart.square().sum(dim=1))
    gradient.add_(apart.mul_((options.kl * pull).unsqueeze(1)))
    return Terms(value - options.kl * kl, kl, rho), gradient


def batch_terms(
    trees: Sequence[Tree],
    policies: Policies,
    batch: Sequence[Work],
    table: Table,
    options: Objective,
    finite: FiniteLog,
) -> tuple[Terms, Pullback]:
    """A batch's part of J, and how to differentiate it: one forward a parent for all its children.

    Clause: OBJ-1 … OBJ-6.  What is held for the backward beside the model's own activations is the gradient by the
    velocities: one state a parent, however many edges leave it.

    Args:
        trees: all trees of the update.
        policies: models and conditions.
        batch: parents with their kept edges.
        table: the batch's part of the table.
        options: clip range, β_KL.
        finite: takes note of non-finite velocities.
    """
    x = stored_states(trees, batch, children=False).to(trees[0].dtype)
    condition = policies.condition.gather(table.rows)
    v = parent_velocities(policies.model, x, trees, batch, table, condition, finite)
    means, fixed = Means.of(table, x, v.detach()), None
    if policies.reference is not None:
        with torch.no_grad():
            v_ref = parent_velocities(policies.reference, x, trees, batch, table, condition, finite)
        fixed = Means.of(table, x, v_ref)
    children = stored_states(trees, batch, children=True)
    terms, gradient = edge_terms(means, fixed, children, options, trees[0].reduction)
    return terms, Pullback(v, means.velocity_gradient(gradient, v))
