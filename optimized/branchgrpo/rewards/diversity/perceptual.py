"""LPIPS-style distance on any feature maps, and its mean over the pairs of a set."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.errors import InputError

TINY = 1e-10
"""Added to a channel norm, as LPIPS does, so that an all-zero feature stays zero."""

Maps = tuple[Float[Tensor, "items _channels _rows _columns"], ...]


def unit_channels(features: Float[Tensor, "items channels rows columns"]) -> Float64[Tensor, "items channels places"]:
    """Features of unit length over the channels, at every place."""
    flat = features.double().flatten(2)
    unit: Tensor = flat / (flat.norm(dim=1, keepdim=True) + TINY)
    return unit


def perceptual_distances(maps: Maps, weights: Sequence[float] | None = None) -> Float64[Tensor, "items items"]:
    """Distance of every pair of images.

    Formula: d(i, j) = Σ_l w_l · mean over places of ‖f̂_l(i) − f̂_l(j)‖², f̂ of unit length over the channels.  With unit
    weights it is LPIPS without its learned channel weights.
    Source: Zhang et al. 2018 (arXiv 1801.03924), Eq. 1.

    Raises:
        InputError: another number of weights than of maps.
    """
    scale = [1.0] * len(maps) if weights is None else list(weights)
    if len(scale) != len(maps):
        raise InputError("len(weights)", len(scale), f"{len(maps)}, one a map")
    count = len(maps[0])
    total = torch.zeros(count, count, dtype=torch.float64)
    for weight, features in zip(scale, maps, strict=True):
        unit = unit_channels(features).cpu()
        for i in range(count):
            total[i] += weight * (unit - unit[i]).square().sum(dim=1).mean(dim=1)
    return total


def mean_pairwise(distances: Float64[Tensor, "items items"]) -> float:
    """Mean over the pairs of different items.

    Raises:
        InputError: fewer than two items.
    """
    count = len(distances)
    if count < 2:
        raise InputError("items", count, "≥ 2, so that there is a pair")
    return float((distances.sum() - distances.trace()) / (count * (count - 1)))
