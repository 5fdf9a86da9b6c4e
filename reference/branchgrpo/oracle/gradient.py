"""Exact gradient of E[r] in θ_i for v_θ = v* + θ_i (spec: oracle)."""

import numpy as np
from jaxtyping import Float64

from branchgrpo.oracle.chain import Chain
from branchgrpo.oracle.laws import Start, gain, leaf_law
from branchgrpo.oracle.reward import QuadraticReward, expected_slope
from branchgrpo.reference.errors import InputError


def mean_sensitivity(chain: Chain, start: Start) -> Float64[np.ndarray, "steps"]:
    """t_i = ∂μ_T/∂θ_i = u_i Π_{k>i} α_k for steps below the start, 0 above it.  Clause: ORACLE-13."""
    sensitivity = np.zeros(chain.steps)
    for i in range(start.depth, chain.steps):
        sensitivity[i] = chain.response[i] * gain(chain, i + 1, chain.steps)
    return sensitivity


def reward_gradient(
    chain: Chain, reward: QuadraticReward, start: Start, theta: Float64[np.ndarray, "steps D"] | None = None
) -> Float64[np.ndarray, "steps D"]:
    """∂E[r]/∂θ_i = t_i (a + 2 q μ_T), one vector a step; θ moves the leaf mean μ_T, never a variance.

    Clause: ORACLE-13.
    """
    mean, _ = leaf_law(chain, start, theta)
    return np.outer(mean_sensitivity(chain, start), expected_slope(reward, mean))


def angle_degrees(a: Float64[np.ndarray, "*shape"], b: Float64[np.ndarray, "*shape"]) -> float:
    """Angle between two gradients, all steps and elements taken as one vector, in [0, 180].

    Clause: ORACLE-17.  2·atan2(‖â − b̂‖, ‖â + b̂‖): exact at small angles, where arccos loses half the digits.

    Raises:
        InputError: a gradient that is zero has no direction.
    """
    for name, value in (("a", a), ("b", b)):
        if not np.linalg.norm(value) > 0.0:
            raise InputError(f"gradient {name}: norm", float(np.linalg.norm(value)), "positive")
    first, second = a / np.linalg.norm(a), b / np.linalg.norm(b)
    half = np.arctan2(np.linalg.norm(first - second), np.linalg.norm(first + second))
    return float(np.degrees(2.0 * half))
