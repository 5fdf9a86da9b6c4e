"""Anderson–Darling test of a fully specified law."""

import functools
import math

import numpy as np
from jaxtyping import Float64
from scipy import optimize, stats

from branchgrpo.properties.budget import ALPHA, POWER
from branchgrpo.properties.statistics.outcome import Outcome, check_sample
from branchgrpo.properties.tolerances import ANDERSON_FINITE_SAMPLE

MINIMUM = 1000
"""Smallest sample: below it the limit law is not within ``ANDERSON_FINITE_SAMPLE`` of the exact one."""


def anderson_limit_sf(a2: float) -> float:
    """P(A² > a) for A² = Σ_j Z_j²/(j(j+1)), the law for n → ∞, to about ten digits at any depth of the tail.

    E e^{sA²} = √(−2πs / cos(½π√(1 + 8s))), inverted along Re s = c: P = (1/π) ∫_0^∞ Re[e^{K(c+iy) − (c+iy)a}/(c+iy)] dy
    with 0 < c < 1, c near the saddle.  Source: Anderson and Darling (1952); Bromwich.
    """
    if a2 <= 0.0:
        return 1.0
    c = 1.0 - 0.5 / max(a2, 1.0)
    y = np.linspace(0.0, 900.0, 90_001)
    s = c + 1j * y
    product = np.cos(0.5 * np.pi * np.sqrt(1.0 + 8.0 * s)) / (-2.0 * np.pi * s)
    log_moment = -0.5 * (np.log(np.abs(product)) + 1j * np.unwrap(np.angle(product)))
    integrand = np.real(np.exp(log_moment - s * a2) / s)
    return float(np.clip(np.trapezoid(integrand, y) / np.pi, 0.0, 1.0))


def anderson_p(a2: float) -> float:
    """p of A², with the factor by which finite samples can exceed the limit."""
    return min(1.0, ANDERSON_FINITE_SAMPLE * anderson_limit_sf(a2))


@functools.cache
def anderson_critical(alpha: float) -> float:
    """The A² at which p = α."""
    return float(optimize.brentq(lambda a: math.log(anderson_p(a) / alpha), 0.5, 60.0, xtol=1e-9))


def anderson_detectable(n: int, alpha: float = ALPHA) -> float:
    """Shift of a normal mean, in σ, found with power ``POWER``.

    A² = Σ_j W_j²/(j(j+1)) with W_j the normalised Legendre scores, so A² ≥ W_1²/2, W_1 = √(3/n) Σ(2u − 1); a shift δ
    gives E W_1 = √(3n)(2Φ(δ/√2) − 1), and W_1's sd under a shift is below 1.
    """
    target = (math.sqrt(2.0 * anderson_critical(alpha)) + float(stats.norm.ppf(POWER))) / math.sqrt(3.0 * n)
    return math.sqrt(2.0) * float(stats.norm.ppf(0.5 * (1.0 + min(target, 1.0 - 1e-12))))


def anderson_statistic(log_cdf: Float64[np.ndarray, "n"], log_sf: Float64[np.ndarray, "n"]) -> float:
    """A² = −n − (1/n) Σ (2i − 1)(log F(x_i) + log(1 − F(x_{n+1−i}))), from both logs in ascending order of x."""
    n = log_cdf.size
    weight = 2.0 * np.arange(1, n + 1) - 1.0
    return float(-n - np.dot(weight, log_cdf + log_sf[::-1]) / n)


def anderson_test(x: Float64[np.ndarray, "n"], mean: float = 0.0, std: float = 1.0, alpha: float = ALPHA) -> Outcome:
    """Anderson–Darling against N(μ, σ²).

    Returns:
        Statistic: A².  Detectable: a shift of the mean, in σ.
    """
    check_sample(x, MINIMUM)
    z = np.sort((x - mean) / std)
    a2 = anderson_statistic(stats.norm.logcdf(z), stats.norm.logsf(z))
    return Outcome("Anderson–Darling", x.size, a2, anderson_p(a2), anderson_detectable(x.size, alpha), alpha)
