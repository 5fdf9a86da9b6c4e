"""The covariance of a whole level, carried from level to level: a second way to the same numbers (spec: oracle)."""

import numpy as np
from jaxtyping import Float64

from branchgrpo.oracle.chain import Chain
from branchgrpo.oracle.covariance import sibling_correlation
from branchgrpo.oracle.laws import Start
from branchgrpo.reference.plan import Plan


def sibling_noise_covariance(factor: int, spread: float) -> Float64[np.ndarray, "K K"]:
    """Cov of one element of the K children's noises: 1 on the diagonal, ρ off it.  Clause: ORACLE-6."""
    rho = sibling_correlation(spread)
    return np.full((factor, factor), rho) + (1.0 - rho) * np.eye(factor)


def next_level_covariance(
    level: Float64[np.ndarray, "nodes nodes"], alpha: float, std: float, noise: Float64[np.ndarray, "K K"]
) -> Float64[np.ndarray, "children children"]:
    """Σ_{i+1} = α_i² Σ_i ⊗ 1·1ᵀ + std_i² I ⊗ R_i.

    Clause: ORACLE-8.  Children copy their parent's α_i x_i and add noise with covariance std_i² R_i, independent
    between parents.
    """
    carried = alpha**2 * np.kron(level, np.ones_like(noise))
    return np.asarray(carried + std**2 * np.kron(np.eye(level.shape[0]), noise))


def level_covariances(plan: Plan, chain: Chain, start: Start) -> list[Float64[np.ndarray, "_ _"]]:
    """Cov of one element over each level under the start, entry 0 being the start itself.  Clause: ORACLE-8."""
    levels = [np.full((1, 1), start.variance)]
    for i in range(start.depth, plan.steps):
        noise = sibling_noise_covariance(plan.branching[i], plan.spreads[i])
        levels.append(next_level_covariance(levels[-1], float(chain.alpha[i]), float(chain.std[i]), noise))
    return levels
