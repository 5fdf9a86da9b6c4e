"""The frozen reference policy of the KL term: adapters off, or a copy of all weights."""

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.protocols import Condition, Guidance, VelocityModel


class FrozenCopy:
    """The weights of the run's beginning, apart from the trained ones: evaluated without gradients (OBJ-5)."""

    def __init__(self, network: Any) -> None:
        self.network = copy.deepcopy(network).eval().requires_grad_(False)
        self.guidance: Guidance = self.network.guidance

    @torch.no_grad()
    def __call__(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """Velocity of the reference policy."""
        velocity: Tensor = self.network(x, sigma, condition)
        return velocity


def reference_policy(network: Any, lora: bool) -> VelocityModel:
    """The policy that the KL term holds on to; made before any weight has changed and before weights are sharded.

    Args:
        network: the policy.
        lora: an adapter is trained, and its absence is the reference; otherwise all weights are copied.
    """
    if lora:
        found: VelocityModel = network.reference()
        return found
    return FrozenCopy(network)
