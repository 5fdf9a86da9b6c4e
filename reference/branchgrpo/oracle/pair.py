"""Path weights of two leaves: exact effective sample size and exact bias of β > 0 (spec: oracle)."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from branchgrpo.oracle.chain import Chain
from branchgrpo.oracle.covariance import sibling_correlation
from branchgrpo.oracle.laws import gain
from branchgrpo.oracle.reward import QuadraticReward
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import Reduction


@dataclass(frozen=True, eq=False)
class PairEdges:
    """The edges with a log-probability from the split at which two leaves part, down to the leaves.

    Clause: ORACLE-18.  The log-ratio of the two leaves' paths is Λ = √W · Z with Z ~ N(0, 1) and
    W = Σ_e c_e χ²_D, for ‖ξ‖² − ‖ξ′‖² = (ξ + ξ′)·(ξ − ξ′) is a product of independent normals.

    Attributes:
        contrast: c_e = 1 − ρ_e²; 1 below the split.
        leaf_gain: h_e = std_e Π_{k>e} α_k, by which the edge's noise enters its leaf.
    """

    contrast: Float64[np.ndarray, "edges"]
    leaf_gain: Float64[np.ndarray, "edges"]


def pair_edges(plan: Plan, chain: Chain, split: int) -> PairEdges:
    """Edges of two leaves that part at a split.

    Clause: ORACLE-18.

    Raises:
        OptionError: a step that is not a split.
    """
    splits = [i for i in range(plan.steps) if plan.branching[i] > 1]
    if split not in splits:
        raise OptionError("split", split, f"one of {splits}")
    steps = [i for i in range(split, plan.steps) if chain.std[i] > 0.0]
    rho = sibling_correlation(plan.spreads[split])
    contrast = [1.0 - rho**2 if i == split else 1.0 for i in steps]
    gains = [float(chain.std[i]) * gain(chain, i + 1, plan.steps) for i in steps]
    return PairEdges(np.array(contrast), np.array(gains))


def effective_beta(beta: float, elements: int, reduction: Reduction) -> float:
    """β for `sum` log-probabilities, β/D for `mean` ones.  Clause: ORACLE-18."""
    return beta / elements if reduction is Reduction.MEAN else beta


def quadrature(scale: float) -> tuple[Float64[np.ndarray, "nodes"], Float64[np.ndarray, "nodes"]]:
    """Nodes s and weights of ∫ f(s) ds over the line, for an f whose narrowest factor has width 1/``scale``.

    Clause: ORACLE-18.  Trapezoid rule in z with s = w sinh z, w = 1/max(scale, 1): f is analytic for |Im z| < π/2, so
    the error at step 0.0225 is e^{−2π(π/2)/0.0225}, nothing; the ends, s ≥ 3·10⁷ w, are cut where f has vanished.
    """
    step = 18.0 / 800
    z = np.arange(-800, 801) * step
    width = 1.0 / max(scale, 1.0)
    return width * np.sinh(z), width * np.cosh(z) * step


def hyperbolic_secant(x: Float64[np.ndarray, "nodes"]) -> Float64[np.ndarray, "nodes"]:
    """1/cosh x without overflow.  Clause: ORACLE-19."""
    decay = np.exp(-np.abs(x))
    return np.asarray(2.0 * decay / (1.0 + decay**2))


def x_over_sinh(x: Float64[np.ndarray, "nodes"]) -> Float64[np.ndarray, "nodes"]:
    """x/sinh x without overflow, 1 at 0.  Clause: ORACLE-20."""
    size = np.maximum(np.abs(x), 1e-300)
    return np.asarray(2.0 * size * np.exp(-size) / -np.expm1(-2.0 * size))


def characteristic(edges: PairEdges, elements: int, t: Float64[np.ndarray, "nodes"]) -> Float64[np.ndarray, "nodes"]:
    """E[e^{itΛ}] = Π_e (1 + c_e t²)^{−D/2}.  Clause: ORACLE-18.  Source: E[e^{−t²W/2}] of scaled χ²."""
    exponent = np.sum(np.log1p(np.outer(edges.contrast, t**2)), axis=0)
    return np.asarray(np.exp(-0.5 * elements * exponent))


def pair_effective_sample_size(edges: PairEdges, elements: int, beta: float, reduction: Reduction) -> float:
    """E[1/Σw²] of the two leaves' softmax weights: 1 + E[sech(βΛ)] = 1 + ½ ∫ sech(πs/2) E[e^{iβsΛ}] ds.

    Clause: ORACLE-19.  Source: w = 1/(1 + e^{∓βΛ}) gives 1/Σw² = 2/(1 + tanh²(βΛ/2)) = 1 + sech(βΛ); Parseval.

    Args:
        edges: of the pair.
        elements: D ≥ 1.
        beta: β ≥ 0.
        reduction: of the log-probabilities.
    """
    strength = effective_beta(beta, elements, reduction)
    s, weight = quadrature(strength * float(np.sqrt(elements * np.sum(edges.contrast))))
    integrand = hyperbolic_secant(0.5 * np.pi * s) * characteristic(edges, elements, strength * s)
    return 1.0 + 0.5 * float(np.sum(weight * integrand))


def pair_fusion_bias(
    edges: PairEdges, reward: QuadraticReward, elements: int, beta: float, reduction: Reduction
) -> float:
    """E[Σ w r] − E[r | n] over the pair: −β̃ Σ_k q_k Σ_e h_e² c_e ∫ πs/sinh(πs) E[e^{iβ̃sΛ}]/(1 + c_e β̃² s²) ds / π.

    Clause: ORACLE-20.  β̃ is the effective β.  Zero for a linear reward (flip the sign of every noise: weights stay,
    deviations change sign), upward for a concave one (q < 0), downward for a convex one.
    Source: only x² terms of one edge survive the flips; w − w′ = tanh of half the log-ratio, then Stein and Parseval.
    """
    strength = effective_beta(beta, elements, reduction)
    s, weight = quadrature(strength * float(np.sqrt(elements * np.sum(edges.contrast))))
    common = weight * x_over_sinh(np.pi * s) * characteristic(edges, elements, strength * s) / np.pi
    total = 0.0
    for contrast, h in zip(edges.contrast.tolist(), edges.leaf_gain.tolist(), strict=True):
        total += h**2 * contrast * float(np.sum(common / (1.0 + contrast * (strength * s) ** 2)))
    return -strength * float(np.sum(reward.quadratic)) * total
