"""Kolmogorov–Smirnov test of a fully specified law."""

import math

import numpy as np
from jaxtyping import Float64
from scipy import stats

from branchgrpo.properties.budget import ALPHA, POWER
from branchgrpo.properties.statistics.outcome import Outcome, check_sample


def ks_detectable(n: int, alpha: float = ALPHA) -> float:
    """Distance between distribution functions found with power ``POWER``, wherever it is.

    If F₁(t) − F₀(t) = Δ at some t, then D ≥ Δ − |F_n(t) − F₁(t)|, and the sd of F_n(t) is at most 1/(2√n).
    """
    return float(stats.kstwo.isf(alpha, n) + stats.norm.ppf(POWER) / (2.0 * math.sqrt(n)))


def ks_distance(u: Float64[np.ndarray, "n"]) -> float:
    """sup |F_n(u) − u| of a sample that is uniform under the null."""
    ordered = np.sort(u)
    rank = np.arange(u.size, dtype=np.float64)
    return float(max(np.max((rank + 1.0) / u.size - ordered), np.max(ordered - rank / u.size)))


def ks_test(x: Float64[np.ndarray, "n"], mean: float = 0.0, std: float = 1.0, alpha: float = ALPHA) -> Outcome:
    """Kolmogorov–Smirnov against N(μ, σ²).

    p by scipy's ``kstwo``: Simard and L'Ecuyer's method, whose tail is twice the one-sided probability, an upper bound.

    Returns:
        Statistic: D.  Detectable: a distance between distribution functions.
    """
    check_sample(x, 1)
    distance = ks_distance(stats.norm.cdf(x, mean, std))
    p = float(stats.kstwo.sf(distance, x.size))
    return Outcome("KS", x.size, distance, min(1.0, p), ks_detectable(x.size, alpha), alpha)
