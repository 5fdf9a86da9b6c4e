"""Diversity of one set from a spectrum: truncated CLIP entropy and the Vendi score."""

import math

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.reference.errors import InputError, is_integer

RANK_FLOOR = 1e-12
"""Eigenvalues below this share of the largest are rounding of zero: float64 eigenvalues of a few thousand vectors are
exact to about n·2⁻⁵³ of the largest, 1e-12 at n = 10⁴."""


def truncated_entropy(vectors: Float64[Tensor, "items dim"], rank: int = 20) -> float:
    """Entropy of a Gaussian with the set's K largest principal variances (TCE on CLIP embeddings).

    Formula: TCE = K/2 · log(2πe) + ½ Σ_{k≤K} log λ_k, λ the largest eigenvalues of the sample covariance (n − 1).
    Source: Ibarrola & Grace 2024 (truncated CLIP entropy), K = 20.

    Raises:
        InputError: not more items than K, or a covariance of lower rank than K (its entropy is −∞).
    """
    if not is_integer(rank) or rank < 1:
        raise InputError("rank", rank, "an integer ≥ 1")
    if len(vectors) <= rank:
        raise InputError("items", len(vectors), f"more than K = {rank}")
    centred = vectors - vectors.mean(dim=0)
    singular: Tensor = torch.linalg.svdvals(centred)
    values = singular.square() / (len(vectors) - 1)
    found = int((values > RANK_FLOOR * values[0]).sum()) if values[0] > 0 else 0
    if found < rank:
        raise InputError("rank of the covariance", found, f"≥ K = {rank}")
    return 0.5 * rank * math.log(2.0 * math.pi * math.e) + 0.5 * float(values[:rank].log().sum())


def vendi_score(vectors: Float64[Tensor, "items dim"]) -> float:
    """Effective number of different items: 1 if all are equal, n if all are orthogonal.

    Formula: exp(−Σ λ log λ), λ the eigenvalues of K/n, K_ij = cos(x_i, x_j).
    Source: Friedman & Dieng 2023 (arXiv 2210.02410), Def. 3.1.

    Raises:
        InputError: no items, or a zero vector, which has no direction.
    """
    if len(vectors) < 1:
        raise InputError("items", 0, "≥ 1")
    norms = vectors.norm(dim=1, keepdim=True)
    for item in torch.nonzero(norms.flatten() == 0).flatten().tolist():
        raise InputError(f"vectors[{item}]", 0.0, "of positive length")
    singular: Tensor = torch.linalg.svdvals(vectors / norms)
    shares = singular.square() / len(vectors)
    shares = shares[shares > 0]
    return float(torch.exp(-(shares * shares.log()).sum()))
