"""The tolerance table: every number that a check compares an error with, each with its derivation.

Roundoff of a sum of N terms is at most (N − 1)·u times the sum of magnitudes, u = 2⁻⁵³ in float64.
"""

import torch

from branchgrpo.reference.types import Reduction

U64 = 2.0**-53
"""Unit roundoff of float64."""

EXACT = 0.0
"""Results that must be the same bits: masks, permutations of rows, integers, values that are only copied."""

PARITY = 1e-12
"""Two float64 implementations, as a share of the tensor's norm: some 10³ operations of u each, in any order, 1.1e-13,
and a decade for what a subtraction of neighbours loses."""

LAW = 1e-12
"""Exact laws from the oracle against the implementation in float64, relative to the largest entry: two recursions of
T ≤ 40 steps of some 20 operations each, 40·20·u = 9e-14, and a decade for coefficients that grow as 1/σ."""

CUBATURE = 1e-11
"""Expectations by a cubature rule of up to 2·10⁴ points with weights that sum to 1: N·u = 2e-12 of the mean magnitude
of the terms, which is a few times the result."""

CUBATURE_SQUARED = 1e-10
"""Second moments by the same rule: a difference of two such numbers, one digit more."""

Z_SCORED = 1e-11
"""Expected gradients with z-scores, by a rule in the direction of the contrasts, against ORACLE-23's integral: the sum
over points, as for ``CUBATURE``, 2e-12; the 1,441 terms of the oracle's trapezoid rule, 1,441·u = 2e-13; z-scores of
values 10² times as large as their contrasts, 10²·u = 1e-14; the rule's truncation, a few u by its choice of points."""

FINITE_DIFFERENCE = 1e-6
"""Central difference against autograd, relative: step h = 1e-5 has truncation h²/6·f‴ ≈ 1e-10 f‴ and roundoff
u·|J|/h ≈ 1e-11·|J|; f‴ up to 10³ where the ratio is exponential in the parameter."""

CONVERGENCE_ORDER = 0.05
"""Order of convergence between T = 80 and T = 160 against 1: the next term of the error is O(1/T) of the first, with a
constant below 4 on shift 3 (σ-steps near 1 are 3 times smaller and near 0 up to 3 times larger than 1/T)."""

ANDERSON_FINITE_SAMPLE = 1.05
"""P(A²_n > a) over its limit is below this for n ≥ 1,000 and p ≥ 5e-9; measured by importance sampling in the suite's
own tests, where the ratio must stay under it."""

SADDLEPOINT = 1e-3
"""Relative error of Lugannani–Rice at n ≥ 10⁴ for the clipped scores; measured against the exact χ² law."""


def convexity(leaves: int) -> float:
    """Relative error of a convex combination of N rewards: N·2⁻⁵³, and 4·u for the weights' own normalisation."""
    return (leaves + 4) * U64


def normalised(nodes: int) -> float:
    """Error of mean 0 and std 1 of n advantages of values with std ≥ 0.1.

    ε = 1e-8 beside a std of 0.1 takes 1e-7 off the std of the advantages; roundoff is 4n·u on top.
    """
    return 1e-7 + 4.0 * nodes * U64


def shift_invariance(shift: float, spread: float, nodes: int) -> float:
    """Change of advantages when a constant is added to rewards of a given spread (max − min).

    The addition rounds each reward by u·(|shift| + |r|), fusion and mean by n times that; the std is ≥ spread/√(2n).
    """
    return float(8.0 * nodes * U64 * (1.0 + abs(shift) / spread) * (2.0 * nodes) ** 0.5)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the spacing of numbers at 1 of a floating dtype."""
    return float(torch.finfo(dtype).eps) / 2.0


def relative_to(dtype: torch.dtype) -> float:
    """``PARITY`` in units of the roundoff of another dtype: two implementations that compute in it."""
    return PARITY / U64 * unit_roundoff(dtype)


def ratio(dtype: torch.dtype, conditioning: float, elements: int, reduction: Reduction) -> float:
    """Distance of an on-policy ratio from 1 when the mean is computed twice in ``dtype``.

    Two computations of a mean in one dtype differ by at most some 16 roundings u of it, hence z by
    16·u·|mean|/std = 16·u·c, and z²/2 by |z| times that, |z| ≤ 9; D of them under ``sum``.
    """
    count = elements if reduction is Reduction.SUM else 1
    return 16.0 * 9.0 * unit_roundoff(dtype) * conditioning * count
