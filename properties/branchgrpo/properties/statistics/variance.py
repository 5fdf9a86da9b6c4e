"""Variance of a normal sample with a known mean: exact."""

import numpy as np
from jaxtyping import Float64
from scipy import stats

from branchgrpo.properties.budget import ALPHA, POWER
from branchgrpo.properties.statistics.outcome import Outcome, check_sample, two_sided


def variance_detectable(n: int, alpha: float = ALPHA) -> float:
    """Relative error of the variance found with power ``POWER``, upwards or downwards, whichever is harder.

    Σ(x − μ)² ~ V·χ²_n for the true V: upwards V = 1 + δ with P(V·χ²_n > c_hi) = power, downwards V = 1 − δ with
    P(V·χ²_n < c_lo) = power.
    """
    low, high = stats.chi2.ppf(alpha / 2.0, n), stats.chi2.isf(alpha / 2.0, n)
    upwards = high / stats.chi2.isf(POWER, n) - 1.0
    downwards = 1.0 - low / stats.chi2.ppf(POWER, n)
    return float(max(upwards, downwards))


def variance_test(
    x: Float64[np.ndarray, "*shape"], variance: float = 1.0, mean: float = 0.0, alpha: float = ALPHA
) -> Outcome:
    """Σ(x − μ)²/σ² ~ χ²_n, exact for independent N(μ, σ²).

    Returns:
        Statistic: mean of (x − μ)²/σ², less 1.  Detectable: relative error of the variance.
    """
    check_sample(x, 1)
    total = float(np.square(x - mean).sum() / variance)
    p = two_sided(float(stats.chi2.cdf(total, x.size)), float(stats.chi2.sf(total, x.size)))
    return Outcome("variance", x.size, total / x.size - 1.0, p, variance_detectable(x.size, alpha), alpha)
