"""Tail probability of the mean of n independent copies of a variable with known cumulant generating function."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from scipy import optimize, stats

from branchgrpo.properties.statistics.outcome import two_sided

Cumulants = tuple[float, float, float]
"""K(t) = log E e^{t(h − E h)}, K′(t), K″(t)."""

REACH = 60.0
"""Tilts are searched up to this many standard errors: beyond, every p is 0 for any purpose here."""

CENTRE = 1e-3
"""Below this many standard errors the tail is taken by its limit, where the formula subtracts two large numbers."""


class Law(ABC):
    """A random variable h by its mean, variance, third central moment and centred cumulant generating function."""

    mean: float
    variance: float
    third: float

    @abstractmethod
    def cumulants(self, t: float) -> Cumulants:
        """K(t), K′(t), K″(t) of h − E h."""

    def domain(self) -> tuple[float, float]:
        """The open interval of t on which K is finite."""
        return -math.inf, math.inf

    def edges(self, n: int) -> tuple[float, float]:
        """Lowest and highest tilt that is searched."""
        reach, (low, high) = REACH / math.sqrt(n * self.variance), self.domain()
        return max(-reach, 0.999 * low), min(reach, 0.999 * high)

    def tilt(self, deviation: float, n: int) -> float:
        """The t with K′(t) = mean of the sample − E h, or the last one searched."""
        low, high = self.edges(n)
        if deviation <= self.cumulants(low)[1]:
            return low
        if deviation >= self.cumulants(high)[1]:
            return high
        root = optimize.brentq(lambda t: self.cumulants(t)[1] - deviation, low, high, xtol=1e-16 * high, rtol=1e-14)
        return float(root)

    def tails(self, t: float, n: int) -> tuple[float, float]:
        """P(h̄ < x) and P(h̄ > x) at x = E h + K′(t), by Lugannani and Rice: relative error O(1/n) in both tails."""
        k, first, second = self.cumulants(t)
        w = math.copysign(math.sqrt(max(2.0 * n * (t * first - k), 0.0)), t)
        if abs(w) < CENTRE:
            correction = -self.third / self.variance**1.5 / (6.0 * math.sqrt(2.0 * math.pi * n))
        else:
            correction = float(stats.norm.pdf(w)) * (1.0 / (t * math.sqrt(n * second)) - 1.0 / w)
        return max(float(stats.norm.cdf(w)) - correction, 0.0), max(float(stats.norm.sf(w)) + correction, 0.0)

    def p_value(self, mean: float, n: int) -> float:
        """Two-sided p of the mean of n copies."""
        return two_sided(*self.tails(self.tilt(mean - self.mean, n), n))

    def critical(self, alpha: float, n: int) -> tuple[float, float]:
        """The means at which the lower and the upper tail are α/2."""
        low, high = self.edges(n)

        def excess(t: float, side: int) -> float:
            return math.log(max(self.tails(t, n)[side], 1e-300)) - math.log(alpha / 2.0)

        bounds = [optimize.brentq(excess, 1e-3 * edge, edge, args=(side,)) for side, edge in enumerate((low, high))]
        return self.mean + self.cumulants(bounds[0])[1], self.mean + self.cumulants(bounds[1])[1]


@dataclass(frozen=True, eq=False)
class Score(Law):
    """A bounded random variable, as values with their probabilities (a quadrature rule of its law).

    Attributes:
        values: the score at every quadrature node.
        weights: > 0, sum 1.
    """

    values: Float64[np.ndarray, "nodes"]
    weights: Float64[np.ndarray, "nodes"]

    def __post_init__(self) -> None:
        mean = float(self.weights @ self.values)
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "variance", float(self.weights @ (self.values - mean) ** 2))
        object.__setattr__(self, "third", float(self.weights @ (self.values - mean) ** 3))

    def cumulants(self, t: float) -> Cumulants:
        """Sums over the quadrature nodes, of e^x − 1 rather than e^x so that small tilts keep their digits."""
        centred = self.values - self.mean
        excess = self.weights * np.expm1(t * centred)
        total = float(excess.sum())
        tilted = (self.weights + excess) / (1.0 + total)
        first = float(tilted @ centred)
        return math.log1p(total), first, float(tilted @ np.square(centred - first))


@dataclass(frozen=True, eq=False)
class QuadraticForm(Law):
    """gᵀMg + bᵀg + c for standard normal g: K(t) = Σ [−½ log(1 − 2tλ) − tλ] + ½t² Σ b̃²/(1 − 2tλ).

    Attributes:
        matrix: M; only its symmetric part counts.
        vector: b.
        constant: c.
    """

    matrix: Float64[np.ndarray, "m m"]
    vector: Float64[np.ndarray, "m"]
    constant: float = 0.0

    def __post_init__(self) -> None:
        values, vectors = np.linalg.eigh(0.5 * (self.matrix + self.matrix.T))
        square = np.square(vectors.T @ self.vector)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "squares", square)
        object.__setattr__(self, "mean", float(values.sum()) + self.constant)
        object.__setattr__(self, "variance", float(2.0 * np.square(values).sum() + square.sum()))
        object.__setattr__(self, "third", float(8.0 * (values**3).sum() + 6.0 * (values * square).sum()))

    def domain(self) -> tuple[float, float]:
        """1 − 2tλ > 0 for every eigenvalue."""
        values: Float64[np.ndarray, m] = self.__dict__["values"]
        low, high = float(values.min()), float(values.max())
        return (1.0 / (2.0 * low) if low < 0 else -math.inf), (1.0 / (2.0 * high) if high > 0 else math.inf)

    def cumulants(self, t: float) -> Cumulants:
        """Closed forms."""
        values, squares = self.__dict__["values"], self.__dict__["squares"]
        rest = 1.0 - 2.0 * t * values
        k = float((-0.5 * np.log1p(-2.0 * t * values) - t * values).sum() + 0.5 * t * t * (squares / rest).sum())
        slope = (values / rest - values).sum() + (t * squares / rest + t * t * squares * values / rest**2).sum()
        curve = (2.0 * values**2 / rest**2).sum() + (squares / rest**3).sum()
        return k, float(slope), float(curve)
