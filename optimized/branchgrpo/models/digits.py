"""A small class-conditional flow-matching network for 8×8 handwritten digits."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from branchgrpo.reference.errors import InputError, OptionError, is_integer
from branchgrpo.reference.protocols import Condition, Guidance, TensorCondition

CLASSES = 10
LATENT_SHAPE = (1, 8, 8)
NULL_LABEL = CLASSES
"""The label that stands for "no condition" in classifier-free guidance."""


@dataclass(frozen=True)
class DigitsConfig:
    """Size of the network: width of the residual stream, hidden width of a block, number of blocks."""

    width: int = 128
    hidden: int = 256
    blocks: int = 3
    frequencies: int = 32

    def __post_init__(self) -> None:
        for name in ("width", "hidden", "blocks", "frequencies"):
            if not is_integer(getattr(self, name)) or getattr(self, name) < 1:
                raise OptionError(f"digits.{name}", getattr(self, name), "an integer ≥ 1")


def sigma_features(sigma: Float[Tensor, "items"], frequencies: int) -> Float[Tensor, "items features"]:
    """Sines and cosines of σ at geometrically spaced frequencies, 1 to 1000 radians (arXiv 1706.03762 §3.5).

    Args:
        sigma: noise levels in [0, 1].
        frequencies: F ≥ 1; the result has 2F features.
    """
    exponents = torch.arange(frequencies, dtype=sigma.dtype, device=sigma.device) / max(frequencies - 1, 1)
    angles = sigma[:, None] * torch.exp(math.log(1000.0) * exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class ModulatedBlock(nn.Module):
    """Residual MLP block whose scale, shift and gate come from the condition (adaLN-Zero, arXiv 2212.09748 §3.2)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, h: Float[Tensor, "items width"], c: Float[Tensor, "items width"]) -> Float[Tensor, "items width"]:
        """Residual update: h + gate · MLP(scale · norm(h) + shift)."""
        scale, shift, gate = self.modulation(c).chunk(3, dim=1)
        updated: Tensor = h + gate * self.down(nn.functional.silu(self.up(self.norm(h) * (1.0 + scale) + shift)))
        return updated


class DigitsVelocity(nn.Module):
    """v_θ(x, σ, label) = ε − x⁰ for images in [−1, 1]: a ``VelocityModel`` (ROLL-3).

    The parameters' dtype is the dtype of the arithmetic; the velocity comes back in the dtype of ``x``.

    Attributes:
        guidance: ``none``, or ``classifier_free``: v⁻ + w·(v⁺ − v⁻) with both branches in one batch (ROLL-4).
    """

    def __init__(self, config: DigitsConfig | None = None, guidance: Guidance | None = None) -> None:
        super().__init__()
        self.config = config or DigitsConfig()
        self.guidance = guidance or Guidance()
        if self.guidance.kind == "embedded":
            raise OptionError("guidance.kind", "embedded", "none or classifier_free: the network takes no scale")
        width = self.config.width
        self.input = nn.Linear(math.prod(LATENT_SHAPE), width)
        self.label = nn.Embedding(CLASSES + 1, width)
        self.time = nn.Sequential(nn.Linear(2 * self.config.frequencies, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(ModulatedBlock(width, self.config.hidden) for _ in range(self.config.blocks))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, math.prod(LATENT_SHAPE))
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """Velocity of every item, guidance applied.

        Clause: ROLL-3, ROLL-4, ERR-3.

        Args:
            x: states, 64 elements each.
            sigma: one noise level an item, in [0, 1].
            condition: ``TensorCondition`` with ``label``, int64 in 0..10, one an item; 10 is the null label.

        Raises:
            InputError: a batch that does not match, another latent size, a label that is missing or out of range.
        """
        labels = self.checked_labels(x, sigma, condition)
        if self.guidance.kind == "none":
            return self.velocity(x, sigma, labels)
        null = torch.full_like(labels, NULL_LABEL)
        both = self.velocity(torch.cat([x, x]), torch.cat([sigma, sigma]), torch.cat([labels, null]))
        positive, negative = both.chunk(2)
        return negative + self.guidance.scale * (positive - negative)

    def velocity(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], labels: Int64[Tensor, "items"]
    ) -> Float[Tensor, "items *latent"]:
        """Velocity without guidance, of inputs that were checked."""
        dtype = self.output.weight.dtype
        time: Tensor = self.time(sigma_features(sigma.to(dtype), self.config.frequencies))
        c = nn.functional.silu(time + self.label(labels))
        h = self.input(x.flatten(1).to(dtype))
        for block in self.blocks:
            h = block(h, c)
        v: Tensor = self.output(self.norm(h))
        velocity: Tensor = v.view(x.shape).to(x.dtype)
        return velocity

    @staticmethod
    def checked_labels(
        x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Int64[Tensor, "items"]:
        """The labels of a batch whose sizes agree.  Clause: ERR-3.

        Raises:
            InputError: names the argument.
        """
        items = x.shape[0]
        if x[0:1].numel() != math.prod(LATENT_SHAPE) * min(items, 1):
            raise InputError("x.shape", tuple(x.shape), f"[items, …] with {math.prod(LATENT_SHAPE)} elements an item")
        if sigma.shape != (items,):
            raise InputError("sigma.shape", tuple(sigma.shape), f"({items},), one an item")
        if not isinstance(condition, TensorCondition) or "label" not in condition.tensors:
            raise InputError("condition", type(condition).__name__, "a TensorCondition with the tensor 'label'")
        labels = condition.tensors["label"]
        if labels.dtype != torch.int64 or labels.shape != (items,):
            found = (labels.dtype, tuple(labels.shape))
            raise InputError("condition.label", found, f"int64 of shape ({items},), one an item")
        if items and not 0 <= int(labels.min()) <= int(labels.max()) <= NULL_LABEL:
            raise InputError("condition.label", (int(labels.min()), int(labels.max())), f"in 0..{NULL_LABEL}")
        return labels
