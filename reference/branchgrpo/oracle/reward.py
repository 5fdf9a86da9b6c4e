"""Rewards with exact Gaussian moments: r(x) = Σ_k q_k x_k² + a_k x_k + c (spec: oracle)."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from branchgrpo.oracle.chain import Chain
from branchgrpo.oracle.laws import Start, leaf_law


@dataclass(frozen=True, eq=False)
class QuadraticReward:
    """r(x) = Σ_k (q_k x_k² + a_k x_k) + c, elementwise.

    Clause: ORACLE-9.

    Attributes:
        quadratic: q; negative is concave.
        linear: a.
        constant: c.
    """

    quadratic: Float64[np.ndarray, "D"]
    linear: Float64[np.ndarray, "D"]
    constant: float = 0.0

    def __call__(self, x: Float64[np.ndarray, "*batch D"]) -> Float64[np.ndarray, "*batch"]:
        """The reward of each state."""
        return np.asarray(np.sum(self.quadratic * x**2 + self.linear * x, axis=-1) + self.constant)


def linear_reward(a: Float64[np.ndarray, "D"], constant: float = 0.0) -> QuadraticReward:
    """r = a·x + c.  Clause: ORACLE-9."""
    return QuadraticReward(np.zeros_like(a), a, constant)


def distance_reward(target: Float64[np.ndarray, "D"]) -> QuadraticReward:
    """r = −‖x − t‖².  Clause: ORACLE-9."""
    return QuadraticReward(-np.ones_like(target), 2.0 * target, -float(np.sum(target**2)))


def expected_reward(reward: QuadraticReward, mean: Float64[np.ndarray, "D"], variance: float) -> float:
    """E[r] = Σ_k q_k (μ_k² + V) + a_k μ_k, plus c.  Clause: ORACLE-9."""
    terms = reward.quadratic * (mean**2 + variance) + reward.linear * mean
    return float(np.sum(terms)) + reward.constant


def expected_slope(reward: QuadraticReward, mean: Float64[np.ndarray, "D"]) -> Float64[np.ndarray, "D"]:
    """E[∂r/∂x_k] = a_k + 2 q_k μ_k.  Clause: ORACLE-9."""
    return np.asarray(reward.linear + 2.0 * reward.quadratic * mean)


def reward_covariance(
    reward: QuadraticReward,
    mean: Float64[np.ndarray, "D"],
    other_mean: Float64[np.ndarray, "D"],
    covariance: float,
) -> float:
    """Cov(r(x), r(y)) = Σ_k 2 q_k² C² + (a_k + 2 q_k μ_k)(a_k + 2 q_k ν_k) C, C = Cov(x_k, y_k).

    Clause: ORACLE-10.  Source: Isserlis; Cov(x², y²) = 2C² + 4μνC and Cov(x², y) = 2μC for jointly Gaussian x, y.
    With y = x (C = V) it is the variance.
    """
    slopes = expected_slope(reward, mean) * expected_slope(reward, other_mean)
    return float(np.sum(2.0 * reward.quadratic**2 * covariance**2 + slopes * covariance))


def node_value(
    chain: Chain, reward: QuadraticReward, start: Start, theta: Float64[np.ndarray, "steps D"] | None = None
) -> float:
    """E[r(leaf) | start]: with a given node, E[r | x_n]; with a random root, E[r].  Clause: ORACLE-9."""
    return expected_reward(reward, *leaf_law(chain, start, theta))
