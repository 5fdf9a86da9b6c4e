"""The rule in the direction of contrasts: exact lengths, exact directions, and refusals."""

import math

import numpy as np
import pytest

from branchgrpo.oracle.zscore import contrast_basis, ratio_expectation
from branchgrpo.properties.contrasts import contrast_rule, radial_rule
from branchgrpo.properties.tolerances import Z_SCORED
from branchgrpo.reference.errors import OptionError


@pytest.mark.parametrize("points", [1, 2, 3])
@pytest.mark.parametrize("dimension", [1, 2, 3, 6])
def test_lengths_have_the_moments_of_chi(dimension, points):
    lengths, weights = radial_rule(dimension, points)
    assert (lengths > 0).all()
    assert (weights > 0).all()
    for order in range(2 * points):
        moment = 2 ** (order / 2) * math.gamma((dimension + order) / 2) / math.gamma(dimension / 2)
        assert weights @ lengths**order == pytest.approx(moment, rel=1e-12)


def test_one_dimension_is_half_range_hermite():
    lengths, weights = radial_rule(1, 1)
    assert lengths[0] == pytest.approx(np.sqrt(2 / np.pi), rel=1e-14)
    assert weights[0] == pytest.approx(1.0, rel=1e-14)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_the_rule_has_the_first_and_second_moments_of_normals(rank):
    contrasts = np.eye(rank, 5) + 0.2 * np.random.default_rng(rank).standard_normal((rank, 5))
    points, weights = contrast_rule(contrasts)
    assert weights.sum() == pytest.approx(1.0, rel=1e-13)
    assert weights @ points == pytest.approx(np.zeros(5), abs=1e-13)
    assert np.einsum("p,pi,pj->ij", weights, points, points) == pytest.approx(np.eye(5), abs=1e-12)


@pytest.mark.parametrize("nodes", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_z_scores_of_any_linear_values_have_their_exact_expectation(nodes, seed):
    """Values with unequal variances and correlations: every axis of the contrasts has a variance of its own."""
    rng = np.random.default_rng(seed)
    values = np.eye(nodes, 5) + 0.2 * rng.standard_normal((nodes, 5))
    noises = rng.standard_normal((nodes, 5))
    points, weights = contrast_rule(contrast_basis(nodes).T @ values)
    centred = points @ (values - values.mean(axis=0)).T
    scores = centred / np.sqrt(np.square(centred).sum(axis=1, keepdims=True) / (nodes - 1))
    found = weights @ np.sum(scores * (points @ noises.T), axis=1)
    assert found == pytest.approx(ratio_expectation(noises @ values.T, values @ values.T), rel=Z_SCORED, abs=Z_SCORED)


def test_more_than_four_nodes_are_refused():
    with pytest.raises(OptionError, match="at most four nodes"):
        contrast_rule(np.eye(4, 6))


@pytest.mark.parametrize("scales", [(1.0, 1.0, 1e-6), (1.0, 1e-6), (1.0, 1.0, 1.0)])
def test_a_grid_that_is_too_large_is_refused(scales):
    """Variances too far apart for a direction's rule, and too many normals beside the contrasts."""
    contrasts = np.zeros((len(scales), 1000))
    contrasts[range(len(scales)), range(len(scales))] = scales
    with pytest.raises(OptionError, match="points of the rule"):
        contrast_rule(contrasts)
