"""Correlation of two normal samples with known means and variances: exact at every ρ₀."""

import math

import numpy as np
from jaxtyping import Float64
from scipy import stats

from branchgrpo.properties.budget import ALPHA, POWER
from branchgrpo.properties.statistics.outcome import Outcome, check_sample, two_sided
from branchgrpo.reference.errors import InputError, OptionError


def odds(rho: float) -> float:
    """(1 + ρ)/(1 − ρ): the variance of x + y over that of x − y."""
    return (1.0 + rho) / (1.0 - rho)


def correlation_detectable(n: int, rho: float = 0.0, alpha: float = ALPHA) -> float:
    """Difference from ρ₀ found with power ``POWER``, upwards or downwards, whichever is harder.

    The ratio is odds(ρ)/odds(ρ₀)·F(n, n) for the true ρ; F's quantiles at 1 − q and q are reciprocal.
    """
    factor = float(stats.f.isf(alpha / 2.0, n, n) * stats.f.ppf(POWER, n, n))
    up, down = odds(rho) * factor, odds(rho) / factor
    return max((up - 1.0) / (up + 1.0) - rho, rho - (down - 1.0) / (down + 1.0))


def correlation_test(
    x: Float64[np.ndarray, "n"], y: Float64[np.ndarray, "n"], rho: float = 0.0, alpha: float = ALPHA
) -> Outcome:
    """[Σ(x + y)²/(1 + ρ₀)] / [Σ(x − y)²/(1 − ρ₀)] ~ F(n, n), exact for standard normal pairs with correlation ρ₀.

    x + y and x − y are independent, with variances 2(1 ± ρ₀).  A common scale of x and y cancels.

    Args:
        x, y: paired, standardised by their known means and standard deviations.
        rho: ρ₀ in (−1, 1).
        alpha: level.

    Returns:
        Statistic: the estimate (q − 1)/(q + 1) of ρ, q = Σ(x + y)²/Σ(x − y)², less ρ₀.  Detectable: error of ρ.
    """
    check_sample(x, 1)
    check_sample(y, 1)
    if x.shape != y.shape:
        raise InputError("pairs: shape", (x.shape, y.shape), "equal")
    if not -1.0 < rho < 1.0:
        raise OptionError("rho", rho, "in (−1, 1)")
    total, contrast = float(np.square(x + y).sum()), float(np.square(x - y).sum())
    ratio = total / contrast if contrast > 0.0 else math.inf
    n = x.size
    f = ratio / odds(rho)
    p = two_sided(float(stats.f.cdf(f, n, n)), float(stats.f.sf(f, n, n)))
    estimate = 1.0 - 2.0 / (ratio + 1.0)
    return Outcome("correlation", n, estimate - rho, p, correlation_detectable(n, rho, alpha), alpha)
