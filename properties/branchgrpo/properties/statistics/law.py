"""Test of a sample mean whose single terms have a known cumulant generating function."""

import math

from scipy import stats

from branchgrpo.properties.budget import ALPHA, POWER
from branchgrpo.properties.statistics.outcome import Outcome
from branchgrpo.properties.statistics.saddlepoint import Law


def law_detectable(law: Law, n: int, alpha: float = ALPHA) -> float:
    """Shift of the mean, in standard deviations of one term, found with power ``POWER``.

    The critical means are exact; the noise around a shifted mean is taken as normal with the null's variance.
    """
    low, high = law.critical(alpha, n)
    std = math.sqrt(law.variance)
    return max(high - law.mean, law.mean - low) / std + float(stats.norm.ppf(POWER)) / math.sqrt(n)


def law_test(mean: float, law: Law, n: int, alpha: float = ALPHA) -> Outcome:
    """Mean of n independent terms against their law, by the saddlepoint.

    Returns:
        Statistic: (mean − E)/sd of one term.  Detectable: a shift of the mean, in the same unit.
    """
    deviation = (mean - law.mean) / math.sqrt(law.variance)
    return Outcome("exact law", n, deviation, law.p_value(mean, n), law_detectable(law, n, alpha), alpha)
