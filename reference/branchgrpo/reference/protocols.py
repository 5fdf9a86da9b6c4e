"""The protocols that models, rewards and noise sources are written against (spec: rollout, reward, noise)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, Self

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """A prompt and its stable identity: the id keys its noise, whatever the batch order (NOISE-4)."""

    id: int
    text: str


@dataclass(frozen=True)
class Guidance:
    """How guidance enters the velocity (ROLL-4).

    ``none``: not at all.  ``embedded``: the scale is an input of the network.
    ``classifier_free``: v = v⁻ + w·(v⁺ − v⁻); the model evaluates both branches *inside* its call, in one batch, with
    gradients through both: the velocity of the rollout and of the update is therefore one and the same function, and
    no caller can forget guidance in training.
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
