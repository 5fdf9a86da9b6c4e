"""Log-probabilities of a level's edges (spec: log_probability)."""

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.types import Reduction


def reduce_elements(
    per_element: Float[Tensor, "items *latent"], items: int, reduction: Reduction
) -> Float64[Tensor, "items"]:
    """Sum or mean over everything but the first dimension, accumulated in float64.  Clause: LOGP-2, LOGP-5."""
    flat = per_element.reshape(items, -1)
    if reduction is Reduction.SUM:
        return flat.sum(dim=1, dtype=torch.float64)
    return flat.mean(dim=1, dtype=torch.float64)


def squared_distance(
    one: Float[Tensor, "items *latent"], other: Float[Tensor, "items *latent"], reduction: Reduction
) -> Float64[Tensor, "items"]:
    """‖one − other‖² an item, reduced; both are widened to float64 before they are subtracted.

    Clause: LOGP-5.
    """
    difference = one.double() - other.double()
    return reduce_elements(difference * difference, len(one), reduction)


def log_probability(
    child: Float[Tensor, "items *latent"],
    mean: Float[Tensor, "items *latent"],
    std: float | Float64[Tensor, "items"],
    reduction: Reduction,
) -> Float64[Tensor, "items"]:
    """log N(child; mean, std²·I), reduced.

    Clause: LOGP-1, LOGP-2, LOGP-3, LOGP-5.  The element-wise constants leave the reduction as one scalar an item.

    Args:
        child: children *as stored* (realised-action rule).
        mean: transition means.
        std: > 0, by which the noise was really scaled; one for all, or one an item.
        reduction: ``sum`` or ``mean`` over the D elements.
    """
    elements = child[0].numel() if reduction is Reduction.SUM else 1
    log_std = math.log(std) if isinstance(std, float) else torch.log(std)
    constant = elements * (log_std + 0.5 * math.log(2.0 * math.pi))
    return squared_distance(child, mean, reduction) * (-0.5 / (std * std)) - constant


def log_normaliser(std: Float64[Tensor, "items"], elements: int, reduction: Reduction) -> Float64[Tensor, "items"]:
    """log of N(·; mean, std²·I)'s normalising factor, reduced.  Clause: LOGP-1, LOGP-2."""
    return (torch.log(std) + 0.5 * math.log(2.0 * math.pi)).mul_(elements if reduction is Reduction.SUM else 1)


def log_density(
    distance: Float64[Tensor, "items"],
    std: Float64[Tensor, "items"],
    normaliser: Float64[Tensor, "items"],
    elements: int,
    reduction: Reduction,
) -> Float64[Tensor, "items"]:
    """log N(child; mean, std²·I) from ‖child − mean‖, reduced.

    Clause: LOGP-1, LOGP-2, LOGP-3.

    Args:
        distance: ≥ 0, of children as stored.
        std: > 0, by which the noise was really scaled.
        normaliser: ``log_normaliser`` of these.
        elements: D.
        reduction: ``sum`` or ``mean`` over the D elements.
    """
    share = 1.0 if reduction is Reduction.SUM else 1.0 / elements
    return (distance / std).square_().mul_(-0.5 * share).sub_(normaliser)


def gaussian_kl(
    mean: Float[Tensor, "items *latent"],
    mean_ref: Float[Tensor, "items *latent"],
    std: float | Float64[Tensor, "items"],
    reduction: Reduction,
) -> Float64[Tensor, "items"]:
    """KL of two kernels of one std: ‖μ_θ − μ_ref‖² / (2 std²), reduced like a log-probability.

    Clause: OBJ-5.  Source: Flow-GRPO Eq. 12.
    """
    return squared_distance(mean, mean_ref, reduction) * (0.5 / (std * std))
