"""The terms of the objective: clipped surrogate, KL, step weights (spec: objective)."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.log_probability import reduce_elements
from branchgrpo.reference.types import Reduction


def clipped_surrogate(
    rho: Float64[Tensor, "*edges"], advantage: Float64[Tensor, "*edges"], low: float, high: float
) -> Float64[Tensor, "*edges"]:
    """min(ρ A, clip(ρ, 1 − ε_lo, 1 + ε_hi) A).

    Clause: OBJ-2.  Source: PPO (arXiv 1707.06347) Eq. 7; BranchGRPO Eq. 9; G²RPO Eq. 7.
    """
    return torch.minimum(rho * advantage, rho.clamp(1.0 - low, 1.0 + high) * advantage)


def gaussian_kl(
    mean: Float[Tensor, "*latent"], mean_ref: Float[Tensor, "*latent"], std: float, reduction: Reduction
) -> Float64[Tensor, ""]:
    """KL of two kernels of one std: ‖μ_θ − μ_ref‖² / (2 std²), in the log-probability's reduction; std includes √Δ.

    Clause: OBJ-5.  Source: Flow-GRPO Eq. 12.
    """
    return reduce_elements((mean.double() - mean_ref.double()).square() / (2.0 * std * std), reduction)


def step_weights(stds: Mapping[int, float], weighting: str) -> dict[int, float]:
    """W per trained step: 1, or proportional to the step's std with mean 1 over the distinct trained steps.

    Clause: OBJ-6.  Source: TempFlow-GRPO (arXiv 2508.04324), noise-aware weighting.

    Args:
        stds: std > 0 of every distinct trained step of the *whole update*.
        weighting: ``uniform`` or ``std``.
    """
    mean = sum(stds.values()) / len(stds)
    return {step: std / mean if weighting == "std" else 1.0 for step, std in stds.items()}
