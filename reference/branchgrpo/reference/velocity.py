"""One checked call of a velocity model (spec: rollout)."""

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.errors import InputError, ModelError
from branchgrpo.reference.protocols import Condition, VelocityModel


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
