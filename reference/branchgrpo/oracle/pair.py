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

NODES = np.arange(-2000, 2001) * (30.0 / 2000)
"""Trapezoid nodes on [−30, 30], step 0.015.  The integrands are analytic in a strip of half-width ≥ 1 about the real
line wherever sech(πs/2) or s/sinh(πs) sets the scale, and below e^{−47} at ±30: rounding error only (see ``refined``)."""


@dataclass(frozen=True, eq=False)
class PairEdges:
    """The edges with a log-probability below the split at which two leaves part.

    Clause: ORACLE-18.

    Attributes:
        contrast: c_e = 1 − ρ_e² of each edge pair; 1 after the split.
        leaf_gain: h_e = std_e Π_{k>e} α_k, by which the edge's noise enters its leaf.
    """

    contrast: Float64[np.ndarray, "edges"]
    leaf_gain: Float64[np.ndarray, "edges"]


def pair_edges(plan: Plan, chain: Chain, split: int) -> PairEdges:
    """Edges of two leaves that part at a split, from the split down.

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


def refined(scale: float) -> tuple[Float64[np.ndarray, "nodes"], float]:
    """Trapezoid nodes and step for an even integrand whose second factor has width 1/``scale``.

    Clause: ORACLE-18.  s = sinh(z)/max(scale, 1): uniform near 0 at the narrow factor's width, sparse in the tails.
    Doubling the number of nodes changes no result by more than 1e-12 (tested).
    """
    z = np.arange(-800, 801) * (18.0 / 800)
    width = 1.0 / max(scale, 1.0)
    return np.sinh(z) * width, width


def log_ratio_scale(beta: float, elements: int, mean: bool) -> float:
    """β of `sum` log-probabilities; β/D of `mean` ones.  Clause: ORACLE-18."""
    return beta / elements if mean else beta
