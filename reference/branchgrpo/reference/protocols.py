"""The protocols that models, rewards, noise and implementations are written against (spec: rollout, reward, noise, trace)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, Self

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from branchgrpo.reference.options import Fusion, Normalization, Objective, PruningRule
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import Reduction


@dataclass(frozen=True)
class Prompt:
    """A prompt and its stable identity: the id keys its noise, whatever the batch order (NOISE-4)."""

    id: int
    text: str


@dataclass(frozen=True)
class Guidance:
    """How guidance enters the velocity (ROLL-4).

    ``none``: not at all.  ``embedded``: the scale is an input of the network.  ``classifier_free``: v = v⁻ + w·(v⁺ − v⁻);
    the model evaluates both branches *inside* its call, in one batch, with gradients through both: the velocity of the
    rollout and of the update is therefore one and the same function, and no caller can forget guidance in training.
    """

    kind: Literal["none", "embedded", "classifier_free"] = "none"
    scale: float = 1.0


class Condition(Protocol):
    """A batch of conditions, one an item."""

    def __len__(self) -> int:
        """Number of items."""
        ...

    def gather(self, index: Int64[Tensor, "items"]) -> Self:
        """Item i of the result is item ``index[i]``: repeats, selects and re-orders, on the condition's device."""
        ...


@dataclass(frozen=True, eq=False)
class TensorCondition:
    """The usual condition: named tensors that share their first dimension."""

    tensors: dict[str, Tensor]

    def __len__(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    def gather(self, index: Int64[Tensor, "items"]) -> Self:
        """Select along the first dimension of every tensor."""
        return type(self)({name: t.index_select(0, index.to(t.device)) for name, t in self.tensors.items()})


class VelocityModel(Protocol):
    """v_θ(x, σ, c) = ε − x⁰ predicted for a batch whose items have their own σ and condition."""

    guidance: Guidance

    def __call__(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """Velocity of every item, guidance applied; no state between calls, so batching changes rounding at most."""
        ...


class RewardModel(Protocol):
    """Scores finished samples: one finite real a sample (REW-1)."""

    name: str
    version: str
    range: tuple[float, float]

    def __call__(self, samples: Tensor, prompts: Sequence[Prompt]) -> Float64[Tensor, "items"]:
        """Rewards of ``samples`` [items, *sample]; sample i belongs to ``prompts[i]``."""
        ...


class NoiseRole(StrEnum):
    """What a draw is for; part of its key (NOISE-4)."""

    ROOT = "root"
    SHARED = "shared"
    PRIVATE = "private"
    SUBSET = "subset"
    WINDOW = "window"


@dataclass(frozen=True, eq=False)
class NoiseKeys:
    """Keys of the draws for nodes of one depth: (iteration, prompt, root, node, role) (NOISE-4).

    Attributes:
        iteration: training iteration, ≥ 0.
        role: root state (depth 0), ξ₀ keyed by the *parent*, or η keyed by the *child*.
        depth: depth of the keyed node.
        prompts: prompt ids.
        roots: index of the root within the prompt.
        nodes: index of the node within its level of its tree, in level order.
    """

    iteration: int
    role: NoiseRole
    depth: int
    prompts: Int64[Tensor, "draws"]
    roots: Int64[Tensor, "draws"]
    nodes: Int64[Tensor, "draws"]


class NoiseSource(Protocol):
    """Standard normal numbers that depend on their key only, not on batch, chunk, rank or resume point (NOISE-4)."""

    def draw(
        self, keys: NoiseKeys, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Float[Tensor, "draws *latent"]:
        """One draw of ``shape`` a key."""
        ...


Levels = tuple[Tensor, ...]
"""Entry d holds the nodes of depth d, ``[prompts, R·n_d, *rest]``, roots outermost, then level order: the children of
node j are nodes j·K … j·K + K − 1 of the next level (TRACE-2)."""


@dataclass(frozen=True, eq=False)
class Trace:
    """A rollout as flat level-order arrays, the interchange between implementations (TRACE-1 … TRACE-3).

    Attributes:
        plan: the plan that was rolled out.
        prompts: one a tree bundle.
        states: depth 0 … T, as stored (realised-action rule): ``[prompts, R·n_d, *latent]``.
        means: depth 1 … T, entry d − 1 for depth d; transition mean of the edge that ends there.
        stds: ``[T]`` standard deviation of every step.
        log_probs: entry d − 1 for depth d, ``[prompts, R·n_d]`` float64; None where the step is deterministic.
    """

    plan: Plan
    prompts: tuple[Prompt, ...]
    states: Levels
    means: Levels
    stds: Float64[Tensor, "steps"]
    log_probs: tuple[Float64[Tensor, "prompts nodes"] | None, ...]


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
        """log N(child; mean, std²) (LOGP-1, LOGP-2)."""
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
        """Grow every prompt's trees (ROLL-1 … ROLL-5)."""
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
    ) -> tuple[Bool[Tensor, "prompts nodes"], ...]:
        """Edges that stay, entry d − 1 for child depth d (PRUNE-1 … PRUNE-6)."""
        ...

    def objective(
        self,
        trace: Trace,
        model: VelocityModel,
        condition: Condition,
        advantages: Levels,
        kept: tuple[Bool[Tensor, "prompts nodes"], ...],
        options: Objective,
        reduction: Reduction,
        reference_model: VelocityModel | None,
    ) -> Float64[Tensor, ""]:
        """J, to be maximised, differentiable in the model's parameters (OBJ-1 … OBJ-7)."""
        ...
