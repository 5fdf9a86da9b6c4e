"""Effective sample size of path weights and bias of β > 0, against element-by-element simulation."""

import numpy as np
import pytest
from helpers_oracle import DATA, SMALL_PLANS, Z_BOUND, make_plan, simulate, z_of_mean

from branchgrpo.conformance.clauses import clause
from branchgrpo.oracle import pair as pair_module
from branchgrpo.oracle.chain import affine_chain
from branchgrpo.oracle.concentration import (
    effective_sample_sizes,
    sibling_squared_norms,
    tree_effective_sample_size,
    tree_path_scores,
)
from branchgrpo.oracle.laws import given_node, leaf_law
from branchgrpo.oracle.pair import PairEdges, pair_edges, pair_effective_sample_size, pair_fusion_bias
from branchgrpo.oracle.reward import QuadraticReward, linear_reward
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.types import Reduction


def simulated_scores(plan, trees):
    """Σ −½‖ξ‖² along each leaf's path."""
    scores = 0.0
    leaves = trees.states[-1].shape[1]
    for noise in trees.noises:
        if noise is not None:
            scores = scores + np.repeat(-0.5 * np.sum(noise**2, axis=2), leaves // noise.shape[1], axis=1)
    return scores


def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("reduction", list(Reduction))
@pytest.mark.parametrize(("elements", "beta"), [(1, 1.0), (6, 0.7)])
@pytest.mark.parametrize("name", ["sde", "flow-denoised", "cps", "identical-siblings"])
@clause("ORACLE-18", "ORACLE-19")
def test_pair_by_simulation(name, elements, beta, reduction):
    plan = SMALL_PLANS[name]
    chain, split = affine_chain(plan, DATA), max(i for i, k in enumerate(plan.branching) if k > 1)
    trees = simulate(plan, DATA, 40_000, elements, seed=41)
    scores = simulated_scores(plan, trees)[:, :2] * beta / (elements if reduction is Reduction.MEAN else 1)
    sizes = 1.0 / np.sum(softmax(scores) ** 2, axis=1)
    expected = pair_effective_sample_size(pair_edges(plan, chain, split), elements, beta, reduction)
    assert z_of_mean(sizes, expected) < Z_BOUND


@clause("ORACLE-19")
def test_pair_limits():
    edges = PairEdges(np.array([0.9]), np.array([0.2]))
    # 1e-12: rounding of a sum of 1601 terms.
    assert pair_effective_sample_size(edges, 64, 0.0, Reduction.SUM) == pytest.approx(2.0, abs=1e-12)
    assert pair_effective_sample_size(edges, 64, 1e6, Reduction.SUM) == pytest.approx(1.0, abs=1e-6)
    none = PairEdges(np.array([0.0]), np.array([0.2]))
    assert pair_effective_sample_size(none, 64, 1.0, Reduction.SUM) == pytest.approx(2.0, abs=1e-12)


@pytest.mark.parametrize("elements", [1, 64, 65_536])
@pytest.mark.parametrize("beta", [1e-3, 1.0, 30.0])
@clause("ORACLE-19", "ORACLE-20")
def test_the_quadrature_has_converged(monkeypatch, elements, beta):
    edges = PairEdges(np.array([1 - 1 / 289, 1.0, 1.0]), np.array([0.2, 0.1, 0.3]))
    reward = QuadraticReward(np.array([-1.0]), np.array([0.0]))

    def both():
        return [
            f(*args, elements, beta, Reduction.SUM)
            for f, args in ((pair_effective_sample_size, (edges,)), (pair_fusion_bias, (edges, reward)))
        ]

    coarse = both()

    def finer(scale):
        step = 20.0 / 2000
        z = np.arange(-2000, 2001) * step
        width = 1.0 / max(scale, 1.0)
        return width * np.sinh(z), width * np.cosh(z) * step

    monkeypatch.setattr(pair_module, "quadrature", finer)
    # 1e-12: rounding; half the step and longer tails change nothing else.
    np.testing.assert_allclose(coarse, both(), rtol=1e-12)


@clause("ORACLE-19")
def test_published_concentration_of_pairs():
    plan = make_plan()
    edges = pair_edges(plan, affine_chain(plan, DATA), 9)
    assert len(edges.contrast) == 11
    sibling = PairEdges(edges.contrast[:1], edges.leaf_gain[:1])
    found = [pair_effective_sample_size(e, d, 1.0, Reduction.SUM) for e in (sibling, edges) for d in (64, 65_536)]
    assert found == pytest.approx([1.15574, 1.00490, 1.04721, 1.00148], abs=5e-6)
    means = [pair_effective_sample_size(e, 65_536, 1.0, Reduction.MEAN) for e in (sibling, edges)]
    assert means == pytest.approx([1.999992, 1.999916], abs=5e-7)


@pytest.mark.parametrize(
    ("factor", "elements", "spread"), [(2, 5, 1.0), (3, 2, 4.0), (4, 1, 0.5), (3, 4, 0.0), (2, 3, np.inf)]
)
@clause("ORACLE-21")
def test_sibling_norms_have_the_law_of_drawn_siblings(factor, elements, spread):
    rng, n = np.random.default_rng(3), 100_000
    norms = sibling_squared_norms(np.random.default_rng(4), (n, 1), factor, spread, elements)[:, 0]
    private = rng.standard_normal((n, factor, elements))
    if np.isfinite(spread):
        private = (rng.standard_normal((n, 1, elements)) + spread * private) / np.sqrt(1 + spread**2)
    drawn = np.sum(private**2, axis=2)
    rho = 0.0 if np.isinf(spread) else 1 / (1 + spread**2)
    for sample in (norms, drawn):
        assert z_of_mean(sample, float(elements)) < Z_BOUND
        products = (sample[:, 0] - elements) * (sample[:, 1] - elements)
        assert z_of_mean(products, 2 * elements * rho**2) < Z_BOUND
        assert z_of_mean((sample[:, -1] - elements) ** 2, 2 * elements) < Z_BOUND
    # A function that sees the joint law, not only two moments: the softmax's effective sample size.
    gap = effective_sample_sizes(-0.5 * norms, 1.0) - effective_sample_sizes(-0.5 * drawn, 1.0)
    assert z_of_mean(gap, 0.0) < Z_BOUND


@clause("ORACLE-21")
def test_tree_scores_have_the_law_of_a_simulated_tree():
    plan = make_plan(6, ("sde", 0.3), (0, 2), 3, 1.0, "denoised")
    chain = affine_chain(plan, DATA)
    drawn = simulated_scores(plan, simulate(plan, DATA, 20_000, 4, seed=44))
    fast = tree_path_scores(plan, chain, 4, 20_000, np.random.default_rng(45))
    assert z_of_mean(fast, -0.5 * 5 * 4) < Z_BOUND
    gap = effective_sample_sizes(fast, 1.0) - effective_sample_sizes(drawn, 1.0)
    assert z_of_mean(gap, 0.0) < Z_BOUND


@clause("ORACLE-21")
def test_a_one_split_tree_agrees_with_the_exact_pair():
    plan = make_plan(6, ("sde", 0.3), (3,), 2, 2.0)
    chain = affine_chain(plan, DATA)
    for reduction in Reduction:
        mean, error = tree_effective_sample_size(plan, chain, 16, 1.0, reduction, 20_000, seed=1)
        assert abs(mean - pair_effective_sample_size(pair_edges(plan, chain, 3), 16, 1.0, reduction)) < Z_BOUND * error


@pytest.mark.parametrize("reduction", list(Reduction))
@pytest.mark.parametrize("name", ["sde", "flow-denoised", "identical-siblings"])
@clause("ORACLE-20")
def test_bias_by_simulation(name, reduction):
    plan = SMALL_PLANS[name]
    chain, split = affine_chain(plan, DATA), max(i for i, k in enumerate(plan.branching) if k > 1)
    state, beta, q = np.array([0.6, -0.9, 0.1]), 1.5, np.array([-1.0, -0.3, -0.6])
    mean, _ = leaf_law(chain, given_node(state, split))
    reward = QuadraticReward(q, -2 * q * mean)  # no slope at the mean: nothing but what the bias is about
    trees = simulate(plan, DATA, 60_000, 3, seed=51, root=state, depth=split)
    scores = simulated_scores(plan, trees)[:, :2] * beta / (3 if reduction is Reduction.MEAN else 1)
    rewards = reward(trees.states[-1])[:, :2]
    # Uniform fusion has no bias and most of the noise: the difference of the two has the bias of the first.
    gap = np.sum(softmax(scores) * rewards, axis=1) - rewards.mean(axis=1)
    bias = pair_fusion_bias(pair_edges(plan, chain, split), reward, 3, beta, reduction)
    assert z_of_mean(gap, bias) < Z_BOUND
    assert z_of_mean(gap, 0.7 * bias) > Z_BOUND


def gaussian_grid(covariance, points):
    """Gauss–Hermite nodes and weights of N(0, covariance)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    dimensions = len(covariance)
    grid = np.stack(np.meshgrid(*[nodes] * dimensions, indexing="ij"), axis=-1).reshape(-1, dimensions)
    mesh = np.stack(np.meshgrid(*[weights] * dimensions, indexing="ij"), axis=-1).reshape(-1, dimensions)
    return grid @ np.linalg.cholesky(covariance).T, np.prod(mesh / np.sqrt(2 * np.pi), axis=1)


@clause("ORACLE-18", "ORACLE-19", "ORACLE-20")
@pytest.mark.parametrize(("rho", "beta"), [(0.0, 0.6), (0.5, 0.6), (1 / 17, 0.3)])
@pytest.mark.parametrize("gains", [(0.7,), (0.5, 0.9)])
def test_pair_by_direct_integration(rho, beta, gains):
    # D = 1: one split edge, and one edge below it, as two or four correlated normals.
    covariance = np.eye(2 * len(gains))
    covariance[0, 1] = covariance[1, 0] = rho
    noise, weight = gaussian_grid(covariance, 120 if len(gains) == 1 else 36)
    pairs = noise.reshape(len(noise), len(gains), 2)
    weights = softmax(-0.5 * beta * np.sum(pairs**2, axis=1))
    leaves = np.einsum("neb,e->nb", pairs, np.array(gains))
    edges = PairEdges(np.array([1 - rho**2, 1.0][: len(gains)]), np.array(gains))
    size = pair_effective_sample_size(edges, 1, beta, Reduction.SUM)
    reward = QuadraticReward(np.array([-0.8]), np.array([2.0]), 5.0)
    bias = pair_fusion_bias(edges, reward, 1, beta, Reduction.SUM)
    found = np.sum(weights * reward(leaves[..., None]), axis=1) @ weight
    exact = 5.0 - 0.8 * np.sum(np.square(gains))
    # 1e-4: Gauss–Hermite with 36 nodes a dimension on a function with poles at distance 1/√β.
    assert 1.0 / np.sum(weights**2, axis=1) @ weight == pytest.approx(size, rel=1e-4)
    assert found - exact == pytest.approx(bias, rel=1e-4)


@clause("ORACLE-20")
def test_bias_signs():
    plan = make_plan()
    edges = pair_edges(plan, affine_chain(plan, DATA), 9)
    concave, convex = (QuadraticReward(np.full(64, q), np.ones(64)) for q in (-1.0, 1.0))
    assert pair_fusion_bias(edges, concave, 64, 1.0, Reduction.SUM) > 0.05
    assert pair_fusion_bias(edges, convex, 64, 1.0, Reduction.SUM) < -0.05
    assert pair_fusion_bias(edges, linear_reward(np.ones(64)), 64, 1.0, Reduction.SUM) == 0.0
    assert pair_fusion_bias(edges, concave, 64, 0.0, Reduction.SUM) == 0.0


def test_wrong_options_are_refused_by_name():
    plan = make_plan(4, splits=(1,))
    chain = affine_chain(plan, DATA)
    with pytest.raises(OptionError, match=r"split = 0: must be one of \[1\]"):
        pair_edges(plan, chain, 0)
    with pytest.raises(OptionError, match=r"trees = 1: must be ≥ 2"):
        tree_effective_sample_size(plan, chain, 4, 1.0, Reduction.SUM, 1, 0)
