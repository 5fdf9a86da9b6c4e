"""Product Gauss–Hermite rules: expectations over the normals of a small tree, exact for polynomials."""

import numpy as np
from jaxtyping import Float64

from branchgrpo.reference.errors import OptionError

MAX_POINTS = 20_000


def hermite_rule(points: int) -> tuple[Float64[np.ndarray, "points"], Float64[np.ndarray, "points"]]:
    """Nodes and weights that integrate polynomials of degree 2·points − 1 against N(0, 1)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    return nodes, weights / weights.sum()


def product_rule(normals: int, points: int) -> tuple[Float64[np.ndarray, "grid normals"], Float64[np.ndarray, "grid"]]:
    """The rule over several normals, exact where no normal has a degree above 2·points − 1.

    Raises:
        OptionError: a grid of more than ``MAX_POINTS`` points.
    """
    if points**normals > MAX_POINTS:
        raise OptionError("points ** normals", points**normals, f"≤ {MAX_POINTS}")
    nodes, weights = hermite_rule(points)
    digits = np.indices((points,) * normals).reshape(normals, -1).T
    return nodes[digits], np.prod(weights[digits], axis=1)
