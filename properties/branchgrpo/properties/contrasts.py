"""Cubature for integrands that see the contrasts of a depth by their direction: radius, direction, and all the rest.

The normals of a tree are split in two: the span of the contrasts, in spherical coordinates, and its complement.  With
values y that differ by contrasts c, a z-score is c/|c|: constant along the radius, smooth over the sphere, and free of
the complement.  Each of the three has a rule of its own that is exact for what it meets, or exact to rounding.
"""

import math

import numpy as np
from jaxtyping import Float64
from scipy.special import gammaln

from branchgrpo.properties.cubature import MAX_POINTS
from branchgrpo.properties.tolerances import U64
from branchgrpo.reference.errors import OptionError

Points = Float64[np.ndarray, "points dimension"]
Weights = Float64[np.ndarray, "points"]

RADII = 2
"""Lengths a direction: exact for cubics in the radius where linear ones are due."""

ANGLES = 6
"""Least number of angles: exact for trigonometric polynomials of degree 5 where degree 2 is due."""


def radial_rule(dimension: int, points: int = RADII) -> tuple[Weights, Weights]:
    """Lengths and weights that integrate polynomials of degree 2·points − 1 against the χ law of |z|, z ~ N(0, I).

    Source: Golub and Welsch (1969), from the moments 2^{j/2} Γ((k + j)/2)/Γ(k/2).  For k = 1 it is half-range
    Gauss–Hermite.
    """
    order = np.arange(2 * points + 1)
    moments = np.exp(order / 2 * math.log(2.0) + gammaln((dimension + order) / 2) - gammaln(dimension / 2))
    upper = np.linalg.cholesky(moments[np.add.outer(order[: points + 1], order[: points + 1])]).T
    ratios = np.diagonal(upper, 1) / np.diagonal(upper)[:-1]
    diagonal = np.diff(ratios, prepend=0.0)
    beside = (np.diagonal(upper)[1:] / np.diagonal(upper)[:-1])[: points - 1]
    lengths, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    return lengths, np.square(vectors[0])


def angles_needed(first: float, second: float) -> int:
    """Angles φ at which the trapezoid rule is exact to u for 1/√(λ₁cos²φ + λ₂sin²φ) times a polynomial of degree 2.

    The integrand is analytic up to |Im φ| = ½·arcosh((λ₁ + λ₂)/|λ₁ − λ₂|), and the error of m angles is e^{−m·Im φ}.
    """
    if first == second:
        return ANGLES
    strip = 0.5 * math.acosh((first + second) / abs(first - second))
    return ANGLES + math.ceil(-math.log(U64) / strip)


def heights_needed(polar: float, around: float) -> int:
    """Gauss–Legendre heights u that are exact to u64 for 1/√(λ_p u² + λ_a(1 − u²)) times a polynomial of degree 2.

    The root's zeros are at u² = 1/(1 − λ_p/λ_a); on the Bernstein ellipse through them m points have error ρ^{−2m}.
    """
    ratio = polar / around
    if ratio == 1.0:
        return RADII
    zero = abs(1.0 - ratio) ** -0.5
    ellipse = zero + math.sqrt(zero * zero - 1.0 if ratio < 1.0 else zero * zero + 1.0)
    return RADII + math.ceil(-math.log(U64) / (2.0 * math.log(ellipse)))


def check_size(count: int) -> None:
    """Refuse a rule of more than ``MAX_POINTS`` points before it is made: variances too far apart, or many normals."""
    if count > MAX_POINTS:
        raise OptionError("points of the rule", count, f"≤ {MAX_POINTS}")


def circle(first: float, second: float) -> tuple[Points, Weights]:
    """Unit vectors of the plane by the trapezoid rule, for the variances of its two axes."""
    count = angles_needed(first, second)
    check_size(count)
    angles = (np.arange(count) + 0.5) * (2.0 * np.pi / count)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1), np.full(count, 1.0 / count)


def sphere(variances: Float64[np.ndarray, "3"]) -> tuple[Points, Weights]:
    """Unit vectors of space: Gauss–Legendre heights along the axis whose variance is furthest off, times a circle."""
    ordered = np.argsort(variances)
    low, middle, high = variances[ordered]
    polar = int(ordered[0] if middle - low > high - middle else ordered[2])
    around = [axis for axis in range(3) if axis != polar]
    ring, ring_weights = circle(*variances[around])
    count = max(heights_needed(float(variances[polar]), float(variances[axis])) for axis in around)
    check_size(count * len(ring))
    heights, height_weights = np.polynomial.legendre.leggauss(count)
    vectors = np.empty((count, len(ring), 3))
    vectors[..., polar] = heights[:, None]
    vectors[..., around] = np.sqrt(1.0 - np.square(heights))[:, None, None] * ring
    weights = np.outer(height_weights / height_weights.sum(), ring_weights)
    return vectors.reshape(-1, 3), weights.reshape(-1)


def directions(variances: Float64[np.ndarray, "rank"]) -> tuple[Points, Weights]:
    """Unit vectors with weights of sum 1, for up to three axes with the variances that contrasts have along them.

    Raises:
        OptionError: more than three axes.
    """
    if len(variances) > 3:
        raise OptionError("contrasts", len(variances), "at most 3: a depth of at most four nodes")
    if len(variances) == 3:
        return sphere(variances)
    if len(variances) == 2:
        return circle(*variances)
    signs = np.array([[1.0], [-1.0]]) if len(variances) else np.zeros((1, 0))
    return signs, np.full(len(signs), 1.0 / len(signs))


def cross_rule(dimension: int) -> tuple[Points, Weights]:
    """The points ±√d·e_j: exact for cubics in d independent normals.  Source: Stroud (1957)."""
    if dimension == 0:
        return np.zeros((1, 0)), np.ones(1)
    axes = math.sqrt(dimension) * np.eye(dimension)
    return np.concatenate([axes, -axes]), np.full(2 * dimension, 0.5 / dimension)


def contrast_rule(
    contrasts: Float64[np.ndarray, "contrasts normals"],
) -> tuple[Float64[np.ndarray, "grid normals"], Float64[np.ndarray, "grid"]]:
    """Points and weights for expectations over normals z of f(z) with c = contrasts·z.

    Exact for c/|c| times a linear function of z, to the roundings of the sum: linear along the radius, ± in the
    complement, and over the sphere exact for up to two axes of equal variance, to u64 otherwise.

    Raises:
        OptionError: contrasts of rank above 3, or a grid of more than ``MAX_POINTS`` points.
    """
    normals = contrasts.shape[1]
    _, singular, basis = np.linalg.svd(np.concatenate([contrasts, np.zeros((1, normals))]))
    rank = int(np.sum(singular > len(singular) * normals * U64 * max(singular[0], np.finfo(np.float64).tiny)))
    units, unit_weights = directions(np.square(singular[:rank]))
    lengths, length_weights = radial_rule(rank) if rank else (np.ones(1), np.ones(1))
    rest, rest_weights = cross_rule(normals - rank)
    check_size(len(units) * len(lengths) * len(rest))
    near = np.einsum("r,dk,kn->rdn", lengths, units, basis[:rank]).reshape(-1, normals)
    far = rest @ basis[rank:]
    weights = np.einsum("r,d,c->rdc", length_weights, unit_weights, rest_weights).reshape(-1)
    return (near[:, None] + far).reshape(-1, normals), weights
