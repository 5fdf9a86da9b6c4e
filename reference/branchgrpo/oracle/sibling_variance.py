"""Exact variance of one split's policy-gradient estimator, with and without a baseline (spec: oracle)."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from branchgrpo.oracle.estimator import Baseline, baseline_factor
from branchgrpo.reference.errors import OptionError


@dataclass(frozen=True)
class SiblingGroup:
    """K equicorrelated siblings with fused rewards r_b = c + h·ξ_b along one direction + residual noise.

    Clause: ORACLE-22.

    Attributes:
        factor: K ≥ 2.
        rho: correlation of the siblings' noises, in [0, 1).
        elements: D ≥ 1.
        slope: h, the reward's change per unit of ξ along the reward's direction.
        offset: c = E[r].
        residual: standard deviation of what later noise adds to r_b, independent between siblings.
    """

    factor: int
    rho: float = 0.0
    elements: int = 1
    slope: float = 1.0
    offset: float = 0.0
    residual: float = 0.0

    def __post_init__(self) -> None:
        if self.factor < 2:
            raise OptionError("factor", self.factor, "≥ 2")
        if not 0.0 <= self.rho < 1.0:
            raise OptionError("rho", self.rho, "in [0, 1)")


def baseline_matrix(baseline: Baseline, factor: int) -> Float64[np.ndarray, "K K"]:
    """B with A = B r: I, I − 11ᵀ/K (group and sibling mean), or I − (11ᵀ − I)/(K − 1).  Clause: ORACLE-22."""
    identity, ones = np.eye(factor), np.ones((factor, factor))
    if baseline == "none":
        return identity
    return identity - ((ones - identity) / (factor - 1) if baseline == "leave_one_out" else ones / factor)


def estimator_variance(group: SiblingGroup, baseline: Baseline) -> float:
    """Trace of Cov of (1/K) Σ_b A_b ξ_b, the score being ξ_b in units of u/std.

    Clause: ORACLE-22.  With R the noises' correlation and S = sym(B):
    along the reward  2h² tr(SRSR); each other element  h² tr(BᵀRBR);
    every element  c² (B1)ᵀR(B1) + residual² tr(BᵀRB);  all over K².
    Source: Isserlis; variance of a quadratic form in normals.
    """
    k, d = group.factor, group.elements
    b = baseline_matrix(baseline, k)
    r = np.full((k, k), group.rho) + (1.0 - group.rho) * np.eye(k)
    s, ones = 0.5 * (b + b.T), np.ones(k)
    along = 2.0 * group.slope**2 * np.trace(s @ r @ s @ r)
    across = group.slope**2 * np.trace(b.T @ r @ b @ r)
    every = group.offset**2 * ((b @ ones) @ r @ (b @ ones)) + group.residual**2 * np.trace(b.T @ r @ b)
    return float(along + (d - 1) * across + d * every) / k**2


def rescaled_variance(group: SiblingGroup, baseline: Baseline) -> float:
    """The variance after dividing the estimator by its factor φ, so that its expectation is the gradient.

    Clause: ORACLE-22.
    """
    factor = baseline_factor(baseline, group.factor, group.factor, group.rho)
    return estimator_variance(group, baseline) / factor**2
