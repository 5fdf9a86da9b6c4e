"""One step for many parents in one pass, compiled on request (spec: kernels, rollout, log_probability)."""

import math
from functools import cache
from typing import no_type_check

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.optimized.compiling import compiled
from branchgrpo.optimized.kernels import Coefficients
from branchgrpo.reference.types import Reduction


@no_type_check
def stochastic_step(x, v, noise, alpha, gamma, std, storage_dtype):  # noqa: ANN001, ANN201
    """Mean, stored children and ‖child − mean‖ in float64, untyped and plain, as a compiler wants it.

    x, v ``[parents, *latent]``; noise ``[parents, K, *latent]``; α, γ, std floats or 0-dimensional float64 tensors.
    """
    mean = alpha * x + gamma * v
    children = (mean.unsqueeze(1) + std * noise).to(storage_dtype)
    distance = (children - mean.unsqueeze(1)).flatten(2)
    return mean, children.flatten(0, 1), torch.linalg.vector_norm(distance, dim=2, dtype=torch.float64).flatten()


@cache
def scalars(step: Coefficients) -> tuple[Float64[Tensor, ""], Float64[Tensor, ""], Float64[Tensor, ""]]:
    """A step's numbers as 0-dimensional tensors: a compiled step must not be specialised to their values."""
    alpha, gamma, std = (torch.tensor(number, dtype=torch.float64) for number in (step.alpha, step.gamma, step.std))
    return alpha, gamma, std


def advance(
    x: Float[Tensor, "parents *latent"],
    v: Float[Tensor, "parents *latent"],
    noise: Float[Tensor, "parents K *latent"] | None,
    step: Coefficients,
    storage_dtype: torch.dtype,
    reduction: Reduction,
    *,
    compile: bool = False,
) -> tuple[Float[Tensor, "parents *latent"], Float[Tensor, "children *latent"], Float64[Tensor, "children"] | None]:
    """Mean, children mean + std·ξ as stored, and their log-probabilities at the stored values.

    Clause: KERN-2 … KERN-5, ROLL-5, LOGP-1, LOGP-3, LOGP-4, LOGP-5.

    Args:
        x, v: parents and their velocities.
        noise: ξ of every child; None for a deterministic step, which has one child a parent and no log-probability.
        step: the step's scalars.
        storage_dtype: dtype in which the children are kept.
        reduction: of the log-probabilities.
        compile: one compiled pass over memory instead of one a line.
    """
    if noise is None:
        mean = step.alpha * x + step.gamma * v
        return mean, mean.to(storage_dtype), None
    if compile:
        mean, children, norm = compiled(stochastic_step)(x, v, noise, *scalars(step), storage_dtype)
    else:
        mean, children, norm = stochastic_step(x, v, noise, step.alpha, step.gamma, step.std, storage_dtype)
    elements = math.prod(x.shape[1:])
    constant, share = math.log(step.std) + 0.5 * math.log(2.0 * math.pi), 1.0
    if reduction is Reduction.SUM:
        constant, share = constant * elements, float(elements)
    return mean, children, norm.square_().mul_(-0.5 * share / (elements * step.std**2)).sub_(constant)
