"""Effective sample size of a whole tree's path weights, by exact simulation of what they depend on (spec: oracle)."""

import numpy as np
from jaxtyping import Float64

from branchgrpo.oracle.chain import Chain
from branchgrpo.oracle.pair import effective_beta
from branchgrpo.oracle.propagation import sibling_noise_covariance
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import Reduction


def sibling_squared_norms(
    rng: np.random.Generator, shape: tuple[int, int], factor: int, spread: float, elements: int
) -> Float64[np.ndarray, "trees parents K"]:
    """‖ξ_b‖² of K equicorrelated siblings in D dimensions, without drawing D numbers.

    Clause: ORACLE-21.  Source: Bartlett; the Gram matrix of the siblings is L T Tᵀ Lᵀ with L Lᵀ = R and T lower
    triangular, T_kk² ~ χ²_{D−k}, N(0, 1) below, columns k ≥ D absent.
    """
    columns = min(factor, elements)
    triangle = np.tril(rng.standard_normal((*shape, factor, columns)), k=-1)
    for k in range(columns):
        triangle[..., k, k] = np.sqrt(rng.chisquare(elements - k, size=shape))
    values, vectors = np.linalg.eigh(sibling_noise_covariance(factor, spread))
    root = vectors * np.sqrt(np.clip(values, 0.0, None)) @ vectors.T
    return np.asarray(np.sum((root @ triangle) ** 2, axis=-1))


def tree_path_scores(
    plan: Plan, chain: Chain, elements: int, trees: int, rng: np.random.Generator
) -> Float64[np.ndarray, "trees leaves"]:
    """Σ −½‖ξ_e‖² over each leaf's path: log p_beh(ℓ | root) with `sum`, less a constant common to all leaves.

    Clause: ORACLE-21.
    """
    scores = np.zeros((trees, 1))
    for i in range(plan.steps):
        factor, parents = plan.branching[i], scores.shape[1]
        scores = np.repeat(scores, factor, axis=1)
        if chain.std[i] > 0.0:
            norms = sibling_squared_norms(rng, (trees, parents), factor, plan.spreads[i], elements)
            scores = scores - 0.5 * norms.reshape(trees, parents * factor)
    return scores


def effective_sample_sizes(scores: Float64[np.ndarray, "trees leaves"], beta: float) -> Float64[np.ndarray, "trees"]:
    """1/Σ w² of w = softmax(β · scores).  Clause: ORACLE-19."""
    shifted = np.exp(beta * (scores - scores.max(axis=1, keepdims=True)))
    return np.asarray(shifted.sum(axis=1) ** 2 / np.sum(shifted**2, axis=1))


def tree_effective_sample_size(
    plan: Plan, chain: Chain, elements: int, beta: float, reduction: Reduction, trees: int, seed: int
) -> tuple[float, float]:
    """Mean of 1/Σw² over the root's leaves, and its standard error.

    Clause: ORACLE-21.

    Args:
        plan: the tree.
        chain: its recursion; only which steps have noise matters.
        elements: D ≥ 1.
        beta: β ≥ 0.
        reduction: of the log-probabilities.
        trees: simulated trees, ≥ 2.
        seed: of the simulation.
    """
    if trees < 2:
        raise OptionError("trees", trees, "≥ 2, for a standard error")
    scores = tree_path_scores(plan, chain, elements, trees, np.random.default_rng(seed))
    sizes = effective_sample_sizes(scores, effective_beta(beta, elements, reduction))
    return float(sizes.mean()), float(sizes.std(ddof=1) / np.sqrt(trees))
