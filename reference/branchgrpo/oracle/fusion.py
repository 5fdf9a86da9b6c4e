"""Exact variance of uniform fusion given a node (spec: oracle)."""

import numpy as np
from jaxtyping import Float64

from branchgrpo.oracle.chain import Chain
from branchgrpo.oracle.covariance import below, leaf_covariance
from branchgrpo.oracle.laws import Start, leaf_law
from branchgrpo.oracle.propagation import level_covariances
from branchgrpo.oracle.reward import QuadraticReward, reward_covariance
from branchgrpo.reference.plan import Plan


def fusion_variance(
    plan: Plan,
    chain: Chain,
    reward: QuadraticReward,
    start: Start,
    theta: Float64[np.ndarray, "steps D"] | None = None,
) -> float:
    """Var(r̄ | n) = (1/|L|) [σ² + Σ_{splits j below n} (K_j − 1) Π_{i>j} K_i · c_j].

    Clause: ORACLE-11.  σ² = Var(r | n), c_j = Cov(r_ℓ, r_ℓ′ | n) for leaves that part at split j; a leaf has
    (K_j − 1) Π_{i>j} K_i partners of that kind.
    """
    mean, variance = leaf_law(chain, start, theta)
    total = reward_covariance(reward, mean, mean, variance)
    for j in range(start.depth, plan.steps):
        if plan.branching[j] > 1:
            partners = (plan.branching[j] - 1) * below(plan, j + 1, plan.steps)
            shared = leaf_covariance(plan, chain, start, j)
            total += partners * reward_covariance(reward, mean, mean, shared)
    return total / below(plan, start.depth, plan.steps)


def fusion_variance_from_matrix(
    plan: Plan,
    chain: Chain,
    reward: QuadraticReward,
    start: Start,
    theta: Float64[np.ndarray, "steps D"] | None = None,
) -> float:
    """The same as the mean of the whole |L| × |L| covariance matrix of rewards, from propagated level covariances.

    Clause: ORACLE-12.  Source: Var(wᵀr) = wᵀ Cov(r) w with w = 1/|L|.
    """
    mean, _ = leaf_law(chain, start, theta)
    states = level_covariances(plan, chain, start)[-1]
    pairs = [reward_covariance(reward, mean, mean, float(c)) for c in states.ravel()]
    return float(np.mean(pairs))


def independent_leaves_variance(
    plan: Plan,
    chain: Chain,
    reward: QuadraticReward,
    start: Start,
    theta: Float64[np.ndarray, "steps D"] | None = None,
) -> float:
    """σ²/|L|, what the variance would be if the leaves were independent given the node.

    Clause: ORACLE-11.  Source: BranchGRPO's claim for uniform fusion.
    """
    mean, variance = leaf_law(chain, start, theta)
    return reward_covariance(reward, mean, mean, variance) / below(plan, start.depth, plan.steps)
