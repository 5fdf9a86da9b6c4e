"""The protocol that properties and conformance drive (spec: trace)."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.options import Fusion, Normalization, Objective, PruningRule
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, NoiseSource, Prompt, VelocityModel
from branchgrpo.reference.trace import Levels, Masks, Trace
from branchgrpo.reference.types import Reduction

CAPABILITIES = frozenset({
    "transition", "branch_noise", "log_probability", "rollout", "fuse", "normalize", "leaf_keys", "prune",
    "trained_subsets", "objective", "singular_rollout", "granular_advantages",
})  # fmt: skip
"""All operations of the protocol, by name (TRACE-4)."""

__all__ = ["CAPABILITIES", "Implementation", "Levels", "Masks", "Trace"]


class Implementation(Protocol):
    """What properties and conformance drive: named operations on arrays, all noise passed in (TRACE-4).

    An implementation lists the operations that it has in ``capabilities``; a missing one is reported as unsupported.
    """

    name: str
    spec_version: str
    capabilities: frozenset[str]

    def transition(
        self, plan: Plan, step: int, x: Float[Tensor, "items *latent"], velocity: Float[Tensor, "items *latent"]
    ) -> tuple[Float[Tensor, "items *latent"], float]:
        """Mean and std of step ``step`` (KERN-1 … KERN-5)."""
        ...

    def branch_noise(
        self, shared: Float[Tensor, "parents *latent"], private: Float[Tensor, "parents K *latent"], spread: float
    ) -> Float[Tensor, "parents K *latent"]:
        """ξ_b = a·ξ₀ + c·η_b (NOISE-1)."""
        ...

    def log_probability(
        self,
        child: Float[Tensor, "items *latent"],
        mean: Float[Tensor, "items *latent"],
        std: float,
        reduction: Reduction,
    ) -> Float64[Tensor, "items"]:
        """Log N(child; mean, std²) (LOGP-1, LOGP-2)."""
        ...

    def rollout(
        self,
        plan: Plan,
        model: VelocityModel,
        prompts: Sequence[Prompt],
        condition: Condition,
        noise: NoiseSource,
        *,
        latent_shape: Sequence[int],
        dtype: torch.dtype,
        storage_dtype: torch.dtype,
        reduction: Reduction,
        iteration: int,
    ) -> Trace:
        """Grow every prompt's trees (ROLL-1 … ROLL-6)."""
        ...

    def fuse(self, trace: Trace, rewards: Float64[Tensor, "prompts leaves models"], options: Fusion) -> Levels:
        """Node values, ``[prompts, R·n_d, models]`` (FUSE-1 … FUSE-6)."""
        ...

    def normalize(self, plan: Plan, values: Levels, weights: Sequence[float], options: Normalization) -> Levels:
        """Advantages, ``[prompts, R·n_d]``, after the weighted sum and the clip (NORM-1 … NORM-7)."""
        ...

    def leaf_keys(
        self, plan: Plan, values: Levels, weights: Sequence[float], options: Normalization
    ) -> Float64[Tensor, "prompts leaves"]:
        """Keys by which pruning orders the leaves of a tree (PRUNE-2)."""
        ...

    def prune(
        self, plan: Plan, keys: Float64[Tensor, "prompts leaves"], rules: Sequence[PruningRule], iteration: int
    ) -> Masks:
        """Edges that stay (PRUNE-1 … PRUNE-6)."""
        ...

    def trained_subsets(self, plan: Plan, prompts: Sequence[Prompt], seed: int, iteration: int) -> Masks:
        """All edges but those of trainable steps that are in the subset of none of their chains (PLAN-7)."""
        ...

    def objective(
        self,
        traces: Sequence[Trace],
        model: VelocityModel,
        condition: Condition,
        advantages: Sequence[Levels],
        kept: Sequence[Masks],
        options: Objective,
        reduction: Reduction,
        reference_model: VelocityModel | None,
    ) -> Float64[Tensor, ""]:
        """J over the trees of all traces, to be maximised, differentiable in the model's parameters (OBJ-1 … OBJ-8).

        One trace a plan; of a plan family the members (k, λ₀) of the ks that are updated together. Entry t of
        ``advantages`` and ``kept`` belongs to trace t; ``condition`` has one item a prompt.
        """
        ...

    def singular_rollout(
        self,
        family: PlanFamily,
        model: VelocityModel,
        prompts: Sequence[Prompt],
        condition: Condition,
        noise: NoiseSource,
        *,
        latent_shape: Sequence[int],
        dtype: torch.dtype,
        storage_dtype: torch.dtype,
        reduction: Reduction,
        iteration: int,
    ) -> dict[tuple[int, int], Trace]:
        """Every member (k, λ) of a plan family (SING-1 … SING-5, GRAN-1 … GRAN-3)."""
        ...

    def granular_advantages(
        self,
        family: PlanFamily,
        k: int,
        values: Mapping[int, Levels],
        weights: Sequence[float],
        options: Normalization,
    ) -> Float64[Tensor, "prompts children"]:
        """A of step k's children: a z-score a granularity, summed over Λ, clipped once (GRAN-4, GRAN-5).

        ``values[λ]`` are the fused values of member (k, λ); the children are those of member (k, λ₀), R·G a prompt.
        """
        ...
