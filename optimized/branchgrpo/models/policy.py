"""The frozen reference policy of a backbone with LoRA."""

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.protocols import Condition, Guidance


class PolicyWithAdapters(Protocol):
    """A velocity whose adapters can be switched off."""

    guidance: Guidance

    def adapters_off(self) -> AbstractContextManager[None]:
        """Context without adapters."""
        ...

    def __call__(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """Velocity of every item."""
        ...


class ReferencePolicy:
    """A ``VelocityModel`` that evaluates a backbone without its adapter, and without gradients (OBJ-5)."""

    def __init__(self, backbone: PolicyWithAdapters) -> None:
        self.backbone = backbone
        self.guidance = backbone.guidance

    @torch.no_grad()
    def __call__(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """Velocity of the reference policy."""
        with self.backbone.adapters_off():
            return self.backbone(x, sigma, condition)
