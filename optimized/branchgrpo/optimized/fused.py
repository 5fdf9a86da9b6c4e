"""One step for many parents in one pass (spec: kernels, rollout, log_probability)."""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.optimized.kernels import Coefficients, transition_mean
from branchgrpo.optimized.log_probability import log_probability
from branchgrpo.reference.types import Reduction


def advance(
    x: Float[Tensor, "parents *latent"],
    v: Float[Tensor, "parents *latent"],
    noise: Float[Tensor, "parents K *latent"] | None,
    step: Coefficients,
    storage_dtype: torch.dtype,
    reduction: Reduction,
) -> tuple[Float[Tensor, "parents *latent"], Float[Tensor, "children *latent"], Float64[Tensor, "children"] | None]:
    """Mean, children mean + std·ξ as stored, and their log-probabilities at the stored values.

    Clause: KERN-2 … KERN-5, ROLL-5, LOGP-1, LOGP-3, LOGP-4.

    Args:
        x, v: parents and their velocities.
        noise: ξ of every child; None for a deterministic step, which has one child a parent and no log-probability.
        step: the step's scalars.
        storage_dtype: dtype in which the children are kept.
        reduction: of the log-probabilities.
    """
    mean = transition_mean(x, v, step)
    if noise is None:
        return mean, mean.to(storage_dtype), None
    children = (mean.unsqueeze(1) + step.std * noise).to(storage_dtype).flatten(0, 1)
    means = mean.repeat_interleave(noise.shape[1], dim=0) if noise.shape[1] > 1 else mean
    return mean, children, log_probability(children, means, step.std, reduction)
