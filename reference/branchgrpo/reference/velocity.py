"""Calls of a velocity model: one, checked; and equal ones, once (spec: rollout, singular)."""

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.errors import InputError, ModelError
from branchgrpo.reference.protocols import Condition, VelocityModel


class CalledOnce:
    """A velocity model that answers equal inputs of one condition from memory.  Clause: SING-4, GRAN-3.

    The members of a plan family repeat each other's states bit for bit, so that σ and the state's bytes tell inputs
    apart. Copies of the velocities are kept as long as the object is: for one rollout, without gradients.
    """

    def __init__(self, model: VelocityModel) -> None:
        self.model, self.guidance = model, model.guidance
        self.known: dict[tuple[bytes, ...], Tensor] = {}

    def __call__(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """The model's velocity, evaluated when this input comes for the first time."""
        key = tuple(part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in (x, sigma))
        if key not in self.known:
            self.known[key] = self.model(x, sigma, condition).clone()
        return self.known[key]


def velocity(
    model: VelocityModel, x: Float[Tensor, "*latent"], sigma: float, condition: Condition, where: str
) -> Float[Tensor, "*latent"]:
    """v_θ(x, σ, c) for one state, checked.

    Clause: ROLL-3, ERR-3.

    Args:
        x: one state; the model sees a batch of one.
        condition: one item.
        where: the step and node, for the error.

    Raises:
        InputError: a condition of another batch size.
        ModelError: another shape, a dtype that is not floating, or a non-finite value.
    """
    if len(condition) != 1:
        raise InputError("len(condition)", len(condition), "1, one item a prompt")
    v = model(x.unsqueeze(0), torch.full((1,), sigma, dtype=x.dtype, device=x.device), condition)
    if v.shape != (1, *x.shape):
        raise ModelError(f"velocity at {where}: shape", tuple(v.shape), f"{(1, *x.shape)}")
    if not v.dtype.is_floating_point:
        raise ModelError(f"velocity at {where}: dtype", v.dtype, "a floating dtype")
    if not bool(torch.isfinite(v).all()):
        raise ModelError(f"velocity at {where}", "NaN or ±inf", "finite")
    return v.squeeze(0).to(x.dtype)
