"""Mean of a normal sample with a known standard deviation: exact."""

import math

import numpy as np
from jaxtyping import Float64
from scipy import stats

from branchgrpo.properties.budget import ALPHA, POWER
from branchgrpo.properties.statistics.outcome import Outcome, check_sample


def mean_detectable(n: int, alpha: float = ALPHA) -> float:
    """Shift in σ found with power ``POWER``: (z_{1−α/2} + z_power)/√n; the other tail adds power only."""
    return float((stats.norm.isf(alpha / 2.0) + stats.norm.ppf(POWER)) / math.sqrt(n))


def mean_test(x: Float64[np.ndarray, "*shape"], mean: float = 0.0, std: float = 1.0, alpha: float = ALPHA) -> Outcome:
    """√n·(x̄ − μ)/σ ~ N(0, 1), exact for independent N(μ, σ²).

    Args:
        x: the sample, all elements independent.
        mean: μ.
        std: σ > 0, known.
        alpha: level.

    Returns:
        Statistic: (x̄ − μ)/σ.  Detectable: a shift of the mean, in σ.
    """
    check_sample(x, 1)
    shift = float((x.mean() - mean) / std)
    p = min(1.0, 2.0 * float(stats.norm.sf(abs(shift) * math.sqrt(x.size))))
    return Outcome("mean", x.size, shift, p, mean_detectable(x.size, alpha), alpha)
