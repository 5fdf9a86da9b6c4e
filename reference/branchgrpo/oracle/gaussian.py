"""Gaussian data, and the exact affine velocity of its flow (spec: oracle)."""

import math
from dataclasses import dataclass

from branchgrpo.reference.errors import OptionError


@dataclass(frozen=True)
class GaussianData:
    """Data x⁰ ~ N(m, τ²·I).

    Clause: ORACLE-1.

    Attributes:
        mean: m, the same for every element.
        tau: τ > 0.
    """

    mean: float
    tau: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.mean):
            raise OptionError("data.mean", self.mean, "finite")
        if not (math.isfinite(self.tau) and self.tau > 0.0):
            raise OptionError("data.tau", self.tau, "finite and > 0")


def noised_variance(data: GaussianData, sigma: float) -> float:
    """q = (1 − σ)² τ² + σ², the variance of x = (1 − σ) x⁰ + σ ε.  Clause: ORACLE-1."""
    return (1.0 - sigma) ** 2 * data.tau**2 + sigma**2


def velocity_slope(data: GaussianData, sigma: float) -> float:
    """a = (σ − (1 − σ) τ²) / q: Cov(ε − x⁰, x) / Var(x).

    Clause: ORACLE-2.  Source: conditional expectation E[ε − x⁰ | x] of jointly Gaussian (ε − x⁰, x).
    """
    return (sigma - (1.0 - sigma) * data.tau**2) / noised_variance(data, sigma)


def velocity_intercept(data: GaussianData, sigma: float) -> float:
    """c in v*(x, σ) = a·x + c, from v* = a·(x − (1 − σ) m) − m.  Clause: ORACLE-2."""
    return -velocity_slope(data, sigma) * (1.0 - sigma) * data.mean - data.mean
