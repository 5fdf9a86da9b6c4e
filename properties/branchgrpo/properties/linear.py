"""Every state and noise of a tree as a linear form in independent normals, from the oracle's recursion."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from branchgrpo.oracle.chain import Chain
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseRole

Key = tuple[NoiseRole, int, int, int]
"""(role, root, depth, node): one independent draw of a prompt."""

Forms = Float64[np.ndarray, "_ normals"]


def draws_of(plan: Plan, chain: Chain, random_root: bool = True) -> list[Key]:
    """The independent draws of a prompt: root states, one shared a splitting parent, one private a stochastic edge.

    Clause: NOISE-3.
    """
    keys: list[Key] = []
    for root in range(plan.roots):
        keys += [(NoiseRole.ROOT, root, 0, 0)] if random_root else []
        for i, (factor, width) in enumerate(zip(plan.branching, plan.level_sizes, strict=False)):
            if chain.std[i] == 0.0:
                continue
            keys += [(NoiseRole.SHARED, root, i, n) for n in range(width) if factor > 1]
            keys += [(NoiseRole.PRIVATE, root, i + 1, n) for n in range(width * factor)]
    return keys


def split_coefficients(factor: int, spread: float) -> tuple[float, float]:
    """Weights of the shared and the private draw of a child (NOISE-1, NOISE-2), from the correlation 1/(1 + s²)."""
    if factor == 1:
        return 0.0, 1.0
    correlation = 0.0 if math.isinf(spread) else 1.0 / (1.0 + spread * spread)
    return math.sqrt(correlation), math.sqrt(1.0 - correlation)


@dataclass(frozen=True, eq=False)
class LinearTree:
    """Linear forms of a prompt's trees over ``draws``, constants left out.

    Attributes:
        draws: the normals, in column order.
        states: depth 0 … T, ``[R·n_d, normals]``.
        noises: entry d − 1 for depth d, ξ of the edges; zero where the step is deterministic.
    """

    draws: list[Key]
    states: list[Forms]
    noises: list[Forms]


def linear_tree(plan: Plan, chain: Chain, random_root: bool = True) -> LinearTree:
    """x_child = α x_parent + std·(a ξ₀ + c η), followed from the roots down."""
    draws = draws_of(plan, chain, random_root)
    column = {key: i for i, key in enumerate(draws)}
    start = np.zeros((plan.roots, len(draws)))
    if random_root:
        for root in range(plan.roots):
            start[root, column[NoiseRole.ROOT, root, 0, 0]] = 1.0
    states, noises = [start], []
    for i, factor in enumerate(plan.branching):
        parents = np.repeat(states[-1], factor, axis=0)
        noise = np.zeros_like(parents)
        shared, private = split_coefficients(factor, plan.spreads[i])
        width = plan.level_sizes[i + 1]
        for row in range(parents.shape[0] if chain.std[i] > 0.0 else 0):
            root, node = divmod(row, width)
            noise[row, column[NoiseRole.PRIVATE, root, i + 1, node]] = private
            if factor > 1:
                noise[row, column[NoiseRole.SHARED, root, i, node // factor]] = shared
        noises.append(noise)
        states.append(float(chain.alpha[i]) * parents + float(chain.std[i]) * noise)
    return LinearTree(draws, states, noises)
