"""Denoiser calls, counted where they happen."""

from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.protocols import Condition, VelocityModel


class CountingModel:
    """A velocity model that counts the items it evaluates: one denoiser call an item (PLAN-4)."""

    def __init__(self, model: VelocityModel) -> None:
        self.model = model
        self.guidance = model.guidance
        self.calls = 0

    def __call__(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """The model's velocity; adds the number of items to ``calls``."""
        self.calls += x.shape[0]
        return self.model(x, sigma, condition)
