"""KID and polynomial MMD²: how far two sets of images lie apart."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.reference.errors import InputError, is_integer
from branchgrpo.reference.options import check_choice
from branchgrpo.rewards.extras import require

Estimator = Literal["unbiased", "biased"]


@dataclass(frozen=True)
class KernelDistance:
    """Mean and spread of MMD² over subsets."""

    mean: float
    std: float


def check_pair(a: Float64[Tensor, "n dim"], b: Float64[Tensor, "m dim"], least: int) -> None:
    """Raise ``InputError`` unless both sets have at least ``least`` finite vectors."""
    for name, vectors in (("a", a), ("b", b)):
        if len(vectors) < least:
            raise InputError(f"len({name})", len(vectors), f"≥ {least}")
        if not bool(torch.isfinite(vectors).all()):
            raise InputError(f"features of {name}", "not finite", "finite")


def polynomial_mmd2(
    a: Float64[Tensor, "n dim"],
    b: Float64[Tensor, "m dim"],
    *,
    degree: int = 3,
    gamma: float | None = None,
    offset: float = 1.0,
    estimator: Estimator = "unbiased",
) -> float:
    """MMD² under k(x, y) = (γ⟨x, y⟩ + c)^degree, γ = 1/dim by default.

    Formula: unbiased: Σ_{i≠j} k(a_i, a_j)/(n(n−1)) + Σ_{i≠j} k(b_i, b_j)/(m(m−1)) − 2 Σ k(a_i, b_j)/(nm), which can be
    negative; biased: the same with the diagonals and n², m², never negative.
    Source: Gretton et al. 2012, Lemma 6 and Eq. 5.

    Raises:
        InputError: fewer than two vectors in a set, or a feature that is not finite.
    """
    poly_kernel = require("torchmetrics.image.kid", "rewards").poly_kernel
    check_choice("estimator", estimator, get_args(Estimator))
    check_pair(a, b, 2)
    aa, bb, ab = (poly_kernel(x, y, degree, gamma, offset) for x, y in ((a, a), (b, b), (a, b)))
    if estimator == "biased":
        return float(aa.mean() + bb.mean() - 2.0 * ab.mean())
    n, m = len(a), len(b)
    within_a = (aa.sum() - aa.trace()) / (n * (n - 1))
    within_b = (bb.sum() - bb.trace()) / (m * (m - 1))
    return float(within_a + within_b - 2.0 * ab.mean())


def kid(
    a: Float64[Tensor, "n dim"],
    b: Float64[Tensor, "m dim"],
    generator: torch.Generator,
    *,
    subsets: int = 100,
    subset_size: int = 1000,
) -> KernelDistance:
    """Kernel distance: unbiased cubic MMD² averaged over random subsets of equal size.

    The subsets are drawn without replacement from ``generator``.  A set smaller than ``subset_size`` lowers the size to
    its own; two sets of exactly that size leave one subset, taken once.
    Source: Bińkowski et al. 2018 (arXiv 1801.01401); the distance of one subset pair is torchmetrics'.

    Raises:
        InputError: fewer than two vectors in a set, or a feature that is not finite.
    """
    poly_mmd = require("torchmetrics.image.kid", "rewards").poly_mmd
    check_pair(a, b, 2)
    for name, value in (("subsets", subsets), ("subset_size", subset_size)):
        if not is_integer(value) or value < (2 if name == "subset_size" else 1):
            raise InputError(name, value, "an integer ≥ 1, for the size ≥ 2")
    size = min(subset_size, len(a), len(b))
    count = 1 if size == len(a) == len(b) else subsets
    draws = []
    for _ in range(count):
        rows_a, rows_b = (torch.randperm(len(x), generator=generator)[:size] for x in (a, b))
        draws.append(poly_mmd(a[rows_a], b[rows_b]))
    values = torch.stack(draws)
    return KernelDistance(float(values.mean()), float(values.std(correction=0)))
