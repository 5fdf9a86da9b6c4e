"""One step for many parents in one pass, compiled on request (spec: kernels, rollout, log_probability)."""

from functools import cache
from typing import no_type_check

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.optimized.compiling import compiled
from branchgrpo.optimized.kernels import Coefficients


@no_type_check
def stochastic_step(x, v, noise, alpha, gamma, std, storage_dtype):  # noqa: ANN001, ANN201
    """Mean, stored children and ‖child − mean‖ in float64, untyped and plain, as a compiler wants it.

    x, v ``[parents, *latent]``; noise ``[parents, K, *latent]``; α, γ, std 0-dimensional float64 tensors, so that one
    graph serves all steps.
    """
    mean = alpha * x + gamma * v
    children = (mean.unsqueeze(1) + std * noise).to(storage_dtype)
    distance = (children - mean.double().unsqueeze(1)).flatten(2)
    return mean, children.flatten(0, 1), torch.linalg.vector_norm(distance, dim=2).flatten()


@cache
def scalars(step: Coefficients) -> tuple[Float64[Tensor, ""], Float64[Tensor, ""], Float64[Tensor, ""]]:
    """A step's numbers as 0-dimensional tensors: a compiled step must not be specialised to their values."""
    alpha, gamma, std = (torch.tensor(number, dtype=torch.float64) for number in (step.alpha, step.gamma, step.std))
    return alpha, gamma, std


def transition(
    x: Float[Tensor, "parents *latent"], v: Float[Tensor, "parents *latent"], step: Coefficients
) -> Float[Tensor, "parents *latent"]:
    """α x + γ v, in one new array.  Clause: KERN-2 … KERN-4."""
    return (x * step.alpha).add_(v * step.gamma)


def advance(
    x: Float[Tensor, "parents *latent"],
    v: Float[Tensor, "parents *latent"],
    noise: Float[Tensor, "children *latent"] | None,
    step: Coefficients,
    out: Float[Tensor, "children *latent"],
    *,
    compile: bool = False,
) -> tuple[Float[Tensor, "parents *latent"], Float64[Tensor, "children"] | None]:
    """Store the children mean + std·ξ; their means, and how far from these they are stored.

    Clause: KERN-2 … KERN-5, ROLL-5, LOGP-3, LOGP-5.

    Args:
        x, v: parents and their velocities.
        noise: ξ of every child, siblings together; None for a deterministic step, which has one child a parent.
        step: the step's scalars.
        out: where the children are put, in the dtype in which they are kept.
        compile: one compiled pass over memory instead of one a line.

    Returns:
        Means, and ‖child − mean‖ with both widened to float64; None for a deterministic step.
    """
    if noise is None:
        mean = transition(x, v, step)
        out.copy_(mean)
        return mean, None
    if compile:
        siblings = torch.unflatten(noise, 0, (len(x), -1))
        mean, children, distance = compiled(stochastic_step)(x, v, siblings, *scalars(step), out.dtype)
        out.copy_(children)
        return mean, distance
    mean = transition(x, v, step)
    centre = mean if len(noise) == len(x) else mean.repeat_interleave(len(noise) // len(x), dim=0)
    out.copy_(torch.add(centre, noise, alpha=step.std))
    return mean, torch.linalg.vector_norm((out - centre.double()).flatten(1), dim=1)
