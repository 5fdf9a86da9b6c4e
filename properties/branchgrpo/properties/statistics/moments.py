"""Skewness and kurtosis against a standard normal, by bounded Hermite scores."""

import functools
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float64
from scipy import optimize, stats

from branchgrpo.properties.budget import ALPHA, POWER
from branchgrpo.properties.statistics.outcome import Outcome, check_sample
from branchgrpo.properties.statistics.saddlepoint import Score

CLIP = 5.0
"""Scores are taken at x clipped to ±5: bounded, so every moment exists; one normal draw in 1.7·10⁶ is beyond."""

MINIMUM = 10_000
"""Smallest sample: below it the clipped fourth score is ruled by single draws and the saddlepoint loses digits."""

Array = Float64[np.ndarray, "*shape"]
Alternative = Callable[[Array, float], Array]


def third_hermite(x: Array) -> Array:
    """He₃ = x³ − 3x: mean E[He₃] is the skewness."""
    return np.asarray(x * (x * x - 3.0))


def fourth_hermite(x: Array) -> Array:
    """He₄ = x⁴ − 6x² + 3: mean E[He₄] is the excess kurtosis."""
    square = x * x
    return np.asarray(square * (square - 6.0) + 3.0)


def skewed(x: Array, delta: float) -> Array:
    """x + δ/6·(x² − 1): skewness δ to first order, mean 0."""
    return np.asarray(x + delta / 6.0 * (x * x - 1.0))


def heavy_tailed(x: Array, delta: float) -> Array:
    """x + δ/24·(x³ − 3x): excess kurtosis δ to first order, mean 0, variance 1 to first order."""
    return np.asarray(x + delta / 24.0 * third_hermite(x))


@functools.cache
def normal_rule() -> tuple[Array, Array]:
    """Nodes and weights for N(0, 1): 1,200 Gauss–Legendre nodes on ±12, beyond which 4·10⁻³³ of the mass lies."""
    nodes, weights = np.polynomial.legendre.leggauss(1200)
    x = 12.0 * nodes
    mass = weights * np.exp(-0.5 * x * x)
    return x, mass / mass.sum()


def clipped_score(
    hermite: Callable[[Array], Array], alternative: Alternative | None = None, delta: float = 0.0
) -> Score:
    """Law of h(clip(x)) for standard normal x, or for x pushed through an alternative."""
    x, weights = normal_rule()
    moved = x if alternative is None else alternative(x, delta)
    return Score(hermite(np.clip(moved, -CLIP, CLIP)), weights)


def moment_detectable(hermite: Callable[[Array], Array], alternative: Alternative, n: int, alpha: float) -> float:
    """The δ whose mean score is beyond the critical one by z_power of its own standard errors, in the harder direction.

    Mean and variance of the score under the alternative are integrals over the normal density.
    """
    low, high = clipped_score(hermite).critical(alpha, n)
    z = float(stats.norm.ppf(POWER))

    def excess(size: float, sign: float) -> float:
        score = clipped_score(hermite, alternative, sign * size)
        error = z * math.sqrt(score.variance / n)
        return score.mean - error - high if sign > 0 else low - score.mean - error

    return max(float(optimize.brentq(excess, 1e-9, 2.0, args=(sign,))) for sign in (1.0, -1.0))


@functools.cache
def skewness_detectable(n: int, alpha: float = ALPHA) -> float:
    """Skewness found with power ``POWER``."""
    return moment_detectable(third_hermite, skewed, n, alpha)


@functools.cache
def kurtosis_detectable(n: int, alpha: float = ALPHA) -> float:
    """Excess kurtosis found with power ``POWER``."""
    return moment_detectable(fourth_hermite, heavy_tailed, n, alpha)


def skewness_test(x: Float64[np.ndarray, "n"], alpha: float = ALPHA) -> Outcome:
    """Mean of He₃(clip(x)) against its exact law's saddlepoint, for a fully specified N(0, 1).

    Returns:
        Statistic: the mean score, the skewness but for the clip.  Detectable: a skewness.
    """
    check_sample(x, MINIMUM)
    score, mean = clipped_score(third_hermite), float(third_hermite(np.clip(x, -CLIP, CLIP)).mean())
    return Outcome("skewness", x.size, mean, score.p_value(mean, x.size), skewness_detectable(x.size, alpha), alpha)


def kurtosis_test(x: Float64[np.ndarray, "n"], alpha: float = ALPHA) -> Outcome:
    """Mean of He₄(clip(x)) against its exact law's saddlepoint, for a fully specified N(0, 1).

    Returns:
        Statistic: the mean score, less its expectation.  Detectable: an excess kurtosis.
    """
    check_sample(x, MINIMUM)
    score, mean = clipped_score(fourth_hermite), float(fourth_hermite(np.clip(x, -CLIP, CLIP)).mean())
    p = score.p_value(mean, x.size)
    return Outcome("kurtosis", x.size, mean - score.mean, p, kurtosis_detectable(x.size, alpha), alpha)
