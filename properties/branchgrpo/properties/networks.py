"""Small velocity models of the checks: a network with guidance and checkpointing, and an elementwise one."""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from branchgrpo.reference.protocols import Condition, Guidance, TensorCondition


def offset_of(condition: Condition, items: int) -> Float[Tensor, "items 1"]:
    """The condition's ``offset``."""
    assert isinstance(condition, TensorCondition)
    assert len(condition) == items
    return condition.tensors["offset"]


class Network(nn.Module):
    """A two-layer velocity network with seeded weights; classifier-free guidance and gradient checkpointing on demand.

    Args:
        latent_shape: shape of one state.
        seed: of the weights.
        guidance: ``none`` or ``classifier_free``, whose unconditional branch sees offset 0.
        checkpointing: recompute activations in the backward pass.
        dtype: of the weights; states are cast to it and back.
    """

    def __init__(
        self,
        latent_shape: tuple[int, ...],
        seed: int = 0,
        *,
        guidance: Guidance | None = None,
        checkpointing: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.guidance = guidance or Guidance()
        self.checkpointing = checkpointing
        size = int(torch.tensor(latent_shape).prod())
        generator = torch.Generator().manual_seed(seed)
        widths = (size + 2, 5, size)
        self.layers = nn.ModuleList([nn.Linear(a, b, dtype=dtype) for a, b in pairwise(widths)])
        for parameter in self.parameters():
            parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator, dtype=dtype)

    def body(self, features: Float[Tensor, "items features"]) -> Float[Tensor, "items size"]:
        """The layers."""
        first, second = self.layers
        out: Tensor = second(torch.tanh(first(features)))
        return out

    def branch(
        self, x: Float[Tensor, "items size"], sigma: Float[Tensor, "items"], offset: Float[Tensor, "items 1"]
    ) -> Float[Tensor, "items size"]:
        """Velocity under one condition."""
        features = torch.cat([x, sigma.unsqueeze(1), offset], dim=1)
        if self.checkpointing and torch.is_grad_enabled():
            out: Tensor = checkpoint(self.body, features, use_reentrant=False)
            return out
        return self.body(features)

    def forward(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """v, with v⁻ + w·(v⁺ − v⁻) under guidance."""
        dtype = next(self.parameters()).dtype
        flat, level = x.flatten(1).to(dtype), sigma.to(dtype)
        offset = offset_of(condition, x.shape[0]).to(dtype)
        v = self.branch(flat, level, offset)
        if self.guidance.kind == "classifier_free":
            negative = self.branch(flat, level, torch.zeros_like(offset))
            v = negative + self.guidance.scale * (v - negative)
        return v.reshape(x.shape).to(x.dtype)


class Elementwise(nn.Module):
    """v = tanh(a·x + b·σ) + offset, element by element: the same bits in any batch.

    Its parameters a, b are scalars; nothing couples elements or items.
    """

    def __init__(self, slope: float = 0.3, level: float = -0.2) -> None:
        super().__init__()
        self.guidance = Guidance()
        self.slope = nn.Parameter(torch.tensor(slope, dtype=torch.float64))
        self.level = nn.Parameter(torch.tensor(level, dtype=torch.float64))

    def forward(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """The velocity in the dtype of x."""
        ones = (1,) * (x.dim() - 1)
        offset = offset_of(condition, x.shape[0]).to(x.dtype).reshape(-1, *ones)
        inner = self.slope.to(x.dtype) * x + self.level.to(x.dtype) * sigma.to(x.dtype).reshape(-1, *ones)
        return torch.tanh(inner) + offset
