"""Exact expectation of the policy-gradient estimators Σ_e w_e A_e ∇ log p_e with uniform fusion (spec: oracle)."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64

from branchgrpo.oracle.chain import Chain, trained_steps
from branchgrpo.oracle.covariance import below, sibling_correlation
from branchgrpo.oracle.gradient import reward_gradient
from branchgrpo.oracle.laws import Start
from branchgrpo.oracle.reward import QuadraticReward
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.plan import Plan

Baseline = Literal["none", "group_mean", "leave_one_out", "sibling_mean"]
EdgeReduction = Literal["edge_mean", "depth_mean"]
EdgeWeights = Literal["uniform", "std"]


@dataclass(frozen=True)
class Estimator:
    """Which estimator: baseline, reduction over edges, edge weights, number of trees whose nodes share one group.

    Clause: ORACLE-14 … ORACLE-16.

    Attributes:
        baseline: what is subtracted from r̄(child): nothing, the mean of its depth, the mean of the *others* of its
            depth, the mean of its sibling group.
        reduction: ``edge_mean`` over all trained edges, or ``depth_mean`` within a depth and then over trained depths.
        edge_weights: ``uniform``, or ``std``: proportional to the step's std, with mean 1 over the trained steps.
        grouped_roots: trees in a depth's group, ≥ 1; trees from independent roots.
    """

    baseline: Baseline = "none"
    reduction: EdgeReduction = "edge_mean"
    edge_weights: EdgeWeights = "uniform"
    grouped_roots: int = 1

    def __post_init__(self) -> None:
        for name, kinds in (("baseline", Baseline), ("reduction", EdgeReduction), ("edge_weights", EdgeWeights)):
            if getattr(self, name) not in get_args(kinds):
                raise OptionError(name, getattr(self, name), f"one of {list(get_args(kinds))}")
        if self.grouped_roots < 1:
            raise OptionError("grouped_roots", self.grouped_roots, "≥ 1")


def baseline_factor(baseline: Baseline, group: int, factor: int, rho: float) -> float:
    """φ with E[(r̄_e − base_e) ∇log p_e] = φ · E[r̄_e ∇log p_e], for any reward.

    Clause: ORACLE-15.  Source: a sibling's noise is ξ_f = ρ ξ_e + independent, so E[r̄_f ∇log p_e] = ρ E[r̄_f ∇log p_f];
    a node that is neither e nor its sibling contributes 0.

    Args:
        baseline: none 1; group mean 1 − (1 + (K − 1)ρ)/n; leave-one-out 1 − (K − 1)ρ/(n − 1); sibling mean
            1 − (1 + (K − 1)ρ)/K = (1 − 1/K)(1 − ρ).  A group of one has no contrast: 0.
        group: n, the nodes of the depth that share a baseline.
        factor: K of the step.
        rho: ρ of its siblings.
    """
    siblings = (factor - 1) * rho
    if baseline == "none":
        return 1.0
    if baseline == "sibling_mean":
        return 1.0 - (1.0 + siblings) / factor
    if group == 1:
        return 0.0
    return 1.0 - siblings / (group - 1) if baseline == "leave_one_out" else 1.0 - (1.0 + siblings) / group


def step_weights(
    plan: Plan, chain: Chain, reduction: EdgeReduction, edge_weights: EdgeWeights = "uniform"
) -> Float64[np.ndarray, "steps"]:
    """Total weight of a step's edges: n_{i+1}/Σ_trained n under ``edge_mean``, 1/|trained| under ``depth_mean``.

    Clause: ORACLE-16.  Times std_i over the trained steps' mean std under ``std`` edge weights (TempFlow-GRPO); 0 for
    a step that is deterministic or not trained.

    Raises:
        OptionError: a plan without a trained step.
    """
    trained = list(trained_steps(plan, chain))
    if not trained:
        raise OptionError("plan: trained steps", tuple(trained), "at least one stochastic step")
    weights = np.zeros(plan.steps)
    for i in trained:
        weights[i] = below(plan, 0, i + 1) if reduction == "edge_mean" else 1.0
    weights /= np.sum(weights)
    return np.asarray(weights * chain.std / np.mean(chain.std[trained])) if edge_weights == "std" else weights


def step_factors(plan: Plan, estimator: Estimator) -> Float64[np.ndarray, "steps"]:
    """φ_i of every step.  Clause: ORACLE-15."""
    factors = [
        baseline_factor(
            estimator.baseline,
            estimator.grouped_roots * below(plan, 0, i + 1),
            plan.branching[i],
            sibling_correlation(plan.spreads[i]),
        )
        for i in range(plan.steps)
    ]
    return np.array(factors)


def expected_estimate(
    plan: Plan,
    chain: Chain,
    reward: QuadraticReward,
    start: Start,
    estimator: Estimator,
    theta: Float64[np.ndarray, "steps D"] | None = None,
) -> Float64[np.ndarray, "steps D"]:
    """E[Σ_e w_e (r̄_e − base_e) ∇_{θ_i} log p_e] = w_i φ_i ∂E[r]/∂θ_i, with `sum` log-probabilities.

    Clause: ORACLE-14.  Source: ∇_{θ_i} log p_e = u_i ξ_e/std_i and E[r(leaf) ξ_e] = std_i Π_{k>i} α_k E[r′(leaf)]
    (Stein).  `mean` log-probabilities divide everything by D.

    Args:
        plan: the tree; one root.
        chain: its recursion.
        reward: linear or quadratic.
        start: random or known root (depth 0).
        estimator: baseline and reduction.
        theta: the point at which the gradient is taken; None is 0.
    """
    if start.depth != 0:
        raise OptionError("start.depth", start.depth, "0: an estimator uses the edges of the whole tree")
    weights = step_weights(plan, chain, estimator.reduction, estimator.edge_weights)
    scale = weights * step_factors(plan, estimator)
    return np.asarray(scale[:, None] * reward_gradient(chain, reward, start, theta))
