"""The score head of ImageReward and of the aesthetic predictor: five affine layers, nothing between them."""

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor, nn

from branchgrpo.rewards.checkpoint import check_shapes

WIDTHS = (1024, 128, 64, 16, 1)
"""Outputs of the five layers; the dropouts between them, which take the missing indices, are idle at evaluation."""

INDICES = (0, 2, 4, 6, 7)
"""Positions of the layers in the published checkpoints, ``layers.i.weight`` and ``layers.i.bias``."""


def head_shapes(features: int, widths: tuple[int, ...] = WIDTHS) -> dict[str, tuple[int, ...]]:
    """Every tensor of a head on ``features`` inputs, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index, inputs, outputs in zip(INDICES, (features, *widths), widths, strict=False):
        shapes |= {f"layers.{index}.weight": (outputs, inputs), f"layers.{index}.bias": (outputs,)}
    return shapes


class LinearHead(nn.Module):
    """features → 1024 → 128 → 64 → 16 → 1, without activations."""

    def __init__(self, name: str, state: Mapping[str, Tensor], features: int) -> None:
        super().__init__()
        check_shapes(name, state, head_shapes(features))
        self.stack = nn.Sequential(
            *(nn.Linear(a, b) for a, b in zip((features, *WIDTHS), WIDTHS, strict=False))
        ).requires_grad_(False)
        for index, layer in zip(INDICES, self.stack, strict=True):
            layer.load_state_dict({leaf: state[f"layers.{index}.{leaf}"] for leaf in ("weight", "bias")})

    def forward(self, x: Float[Tensor, "items features"]) -> Float[Tensor, "items"]:
        """One number an item."""
        result: Tensor = self.stack(x)
        return result.squeeze(-1)
