"""Exact expectation of the estimator with depth-wise z-scored advantages, linear reward (spec: oracle)."""

import numpy as np
from jaxtyping import Float64

from branchgrpo.oracle.chain import Chain
from branchgrpo.oracle.covariance import below
from branchgrpo.oracle.estimator import EdgeReduction, step_weights
from branchgrpo.oracle.gradient import reward_gradient
from branchgrpo.oracle.laws import Start, gain
from branchgrpo.oracle.propagation import level_covariances, sibling_noise_covariance
from branchgrpo.oracle.reward import QuadraticReward
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.plan import Plan


def level_value_covariance(plan: Plan, chain: Chain, start: Start, depth: int) -> Float64[np.ndarray, "nodes nodes"]:
    """Cov of r̄ over the nodes of a depth for r = x: block means of the leaves' covariance.  Clause: ORACLE-23."""
    leaves = level_covariances(plan, chain, start)[-1]
    size = below(plan, depth, plan.steps)
    nodes = leaves.shape[0] // size
    return np.asarray(leaves.reshape(nodes, size, nodes, size).mean(axis=(1, 3)))


def noise_value_covariance(plan: Plan, chain: Chain, step: int) -> Float64[np.ndarray, "nodes nodes"]:
    """Cov(ξ_e, r̄(f)) over the nodes e, f of depth step + 1 for r = x: std G (I ⊗ R).  Clause: ORACLE-23."""
    noise = sibling_noise_covariance(plan.branching[step], plan.spreads[step])
    block = np.kron(np.eye(below(plan, 0, step)), noise)
    return np.asarray(float(chain.std[step]) * gain(chain, step + 1, plan.steps) * block)


def contrast_basis(n: int) -> Float64[np.ndarray, "n contrasts"]:
    """Q with QᵀQ = I and QQᵀ = P = I − 11ᵀ/n: Helmert's contrasts.  Clause: ORACLE-23."""
    basis = np.zeros((n, n - 1))
    for k in range(1, n):
        basis[:k, k - 1] = 1.0
        basis[k, k - 1] = -float(k)
    return np.asarray(basis / np.linalg.norm(basis, axis=0))


def ratio_expectation(
    cross: Float64[np.ndarray, "nodes nodes"], covariance: Float64[np.ndarray, "nodes nodes"]
) -> float:
    """E[ξᵀ P y / s] for jointly Gaussian (ξ, y), s² = yᵀPy/(n − 1), C = Cov(ξ, y), Σ = Cov(y), n ≥ 2.

    Clause: ORACLE-23.  With λ_k, u_k the eigenpairs of QᵀΣQ and m_k = u_kᵀ QᵀCQ u_k,
    √((n − 1)/π) ∫_0^∞ t^{−1/2} Π_k (1 + 2tλ_k)^{−1/2} Σ_k m_k/(1 + 2tλ_k) dt.
    Source: E[ξ | y] = C Σ^{−1} y; x^{−1/2} = π^{−1/2} ∫ t^{−1/2} e^{−tx} dt; Gaussian integral.  With t = e^{2v} the
    trapezoid rule converges geometrically; the integrand falls as e^{v} and e^{−2v} or faster at its ends.
    """
    n = covariance.shape[0]
    basis = contrast_basis(n)
    spread, vectors = np.linalg.eigh(basis.T @ covariance @ basis)
    if not spread[-1] > 0.0:
        return 0.0
    rotated = basis @ vectors
    projected = np.einsum("ik,ij,jk->k", rotated, cross, rotated)
    # A direction in which the values cannot differ (λ = 0 to n roundings) carries no covariance with the noise either.
    real = spread > n * np.finfo(np.float64).eps * spread[-1]
    v = np.arange(-720, 721) * 0.05
    t = np.exp(2.0 * v) / spread[-1]
    factors = 1.0 + 2.0 * np.outer(t, spread[real])
    root_determinant = np.exp(-0.5 * np.sum(np.log(factors), axis=1))
    integrand = np.sqrt(t) * root_determinant * np.sum(projected[real] / factors, axis=1)
    return float(np.sqrt((n - 1) / np.pi) * 0.1 * np.sum(integrand))


def zscore_factors(plan: Plan, chain: Chain, start: Start) -> Float64[np.ndarray, "steps"]:
    """φ_i with E[mean over the depth of z-scored A_e ∇log p_e] = φ_i/|a| · ∂E[r]/∂θ_i, r = a·x; 0 for one node.

    Clause: ORACLE-23.  Scope tree, Bessel-corrected std, ε = 0, no clip.
    """
    factors = np.zeros(plan.steps)
    for i in range(plan.steps):
        if chain.std[i] > 0.0 and below(plan, 0, i + 1) > 1:
            cross = noise_value_covariance(plan, chain, i)
            ratio = ratio_expectation(cross, level_value_covariance(plan, chain, start, i + 1))
            factors[i] = ratio / np.trace(cross)
    return factors


def expected_zscore_estimate(
    plan: Plan, chain: Chain, reward: QuadraticReward, start: Start, reduction: EdgeReduction
) -> Float64[np.ndarray, "steps D"]:
    """E[Σ_e w_e A_e ∇_{θ_i} log p_e] with z-scored A.

    Clause: ORACLE-23.

    Raises:
        OptionError: a reward that is not linear.
    """
    if np.any(reward.quadratic != 0.0):
        raise OptionError("reward.quadratic", reward.quadratic.tolist(), "0: exact for a linear reward only")
    scale = step_weights(plan, chain, reduction) * zscore_factors(plan, chain, start)
    return np.asarray(scale[:, None] * reward_gradient(chain, reward, start) / np.linalg.norm(reward.linear))
