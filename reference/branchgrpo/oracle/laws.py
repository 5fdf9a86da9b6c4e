"""Exact law of a node at every depth (spec: oracle)."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64

from branchgrpo.oracle.chain import Chain
from branchgrpo.reference.errors import InputError, is_integer


@dataclass(frozen=True, eq=False)
class Start:
    """Where the recursion starts: a node whose state is known, or a root that is drawn.

    Clause: ORACLE-4.  Variance 0: everything downstream is a law *given* that node; variance 1 at depth 0 with mean 0
    is the random root.

    Attributes:
        mean: one value an element.
        variance: ≥ 0, the same for every element.
        depth: ≥ 0.
    """

    mean: Float64[np.ndarray, "D"] = field(default_factory=lambda: np.zeros(1))
    variance: float = 0.0
    depth: int = 0

    def __post_init__(self) -> None:
        if not np.isfinite(self.mean).all():
            raise InputError("start.mean", self.mean.tolist(), "finite")
        if not 0.0 <= self.variance < float("inf"):
            raise InputError("start.variance", self.variance, "finite and ≥ 0")
        if not is_integer(self.depth) or self.depth < 0:
            raise InputError("start.depth", self.depth, "an integer ≥ 0")


def random_root(elements: int = 1) -> Start:
    """x_0 ~ N(0, I).  Clause: ORACLE-4."""
    return Start(np.zeros(elements), 1.0, 0)


def given_node(state: Float64[np.ndarray, "D"], depth: int = 0) -> Start:
    """A node with a known state.  Clause: ORACLE-4."""
    return Start(state, 0.0, depth)


def check_theta(
    chain: Chain, start: Start, theta: Float64[np.ndarray, "steps D"] | None
) -> Float64[np.ndarray, "steps D"]:
    """θ, with None for zero, checked against T and D.

    Clause: ORACLE-4.

    Raises:
        InputError: a start below the leaves, or a θ of another shape.
    """
    if start.depth > chain.steps:
        raise InputError("start.depth", start.depth, f"at most T = {chain.steps}")
    shape = (chain.steps, start.mean.shape[0])
    if theta is None:
        return np.zeros(shape)
    if theta.shape != shape:
        raise InputError("theta: shape", theta.shape, f"{shape}, one vector a step")
    return theta


def node_means(
    chain: Chain, start: Start, theta: Float64[np.ndarray, "steps D"] | None = None
) -> Float64[np.ndarray, "depths D"]:
    """μ_{i+1} = α_i μ_i + b_i + u_i θ_i, from the start's depth (row 0) to the leaves (last row).  Clause: ORACLE-4."""
    vectors = check_theta(chain, start, theta)
    rows = [start.mean]
    for i in range(start.depth, chain.steps):
        rows.append(chain.alpha[i] * rows[-1] + chain.shift[i] + chain.response[i] * vectors[i])
    return np.stack(rows)


def node_variances(chain: Chain, start: Start) -> Float64[np.ndarray, "depths"]:
    """V_{i+1} = α_i² V_i + std_i², from the start's depth (entry 0) to the leaves (last entry).  Clause: ORACLE-4."""
    values = [start.variance]
    for i in range(start.depth, chain.steps):
        values.append(float(chain.alpha[i] ** 2 * values[-1] + chain.std[i] ** 2))
    return np.array(values)


def gain(chain: Chain, start: int, stop: int) -> float:
    """G(d → d′) = Π_{d ≤ i < d′} α_i: how much of a change at depth d is left at depth d′.  Clause: ORACLE-4."""
    return float(np.prod(chain.alpha[start:stop]))


def leaf_law(
    chain: Chain, start: Start, theta: Float64[np.ndarray, "steps D"] | None = None
) -> tuple[Float64[np.ndarray, "D"], float]:
    """Mean and variance of a leaf below the start.  Clause: ORACLE-4."""
    return node_means(chain, start, theta)[-1], float(node_variances(chain, start)[-1])


def cps_small_step_variance(tau: float, eta: float) -> float:
    """Leaf variance of CPS as T → ∞: τ² (1 + cos(ηπ/2)) / 2 = τ² cos²(ηπ/4), short of the data's τ².

    Clause: ORACLE-5.  Source: near σ = 0 a step has α = 1 − (1 − cos φ) σ²/q and variance σ² sin² φ, so the variance
    settles at σ² sin² φ / (1 − α²) → τ² sin² φ / (2 (1 − cos φ)).
    """
    return tau**2 * float(np.cos(eta * np.pi / 4.0)) ** 2
