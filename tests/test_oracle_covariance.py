"""Covariances between nodes: by parting depth, by propagation, by simulation and by a reference rollout."""

import numpy as np
import pytest
import torch
from helpers_oracle import DATA, DENSE, SMALL_PLANS, Z_BOUND, make_plan, simulate, z_of_covariance, z_of_mean

from branchgrpo.conformance.clauses import clause
from branchgrpo.models.gaussian import ExactGaussian
from branchgrpo.oracle.chain import affine_chain
from branchgrpo.oracle.covariance import (
    Address,
    leaf_covariance,
    leaf_covariance_matrix,
    leaf_parting_depths,
    node_covariance,
    parting_depth,
    sibling_correlation,
)
from branchgrpo.oracle.laws import given_node, node_variances, random_root
from branchgrpo.oracle.propagation import level_covariances
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.protocols import Prompt, TensorCondition
from branchgrpo.reference.rollout import Sampling, rollout


def nodes_of(plan):
    counts = np.cumprod([1, *plan.branching])
    return [Address(d, i) for d, n in enumerate(counts) for i in range(n)]


@clause("ORACLE-6")
def test_sibling_correlation():
    assert sibling_correlation(4.0) == 1.0 / 17.0
    assert sibling_correlation(0.0) == 1.0
    assert sibling_correlation(float("inf")) == 0.0


@clause("ORACLE-6")
def test_parting_depth_of_the_dense_tree():
    plan = make_plan()
    assert parting_depth(plan, Address(20, 0), Address(20, 1)) == 9
    assert parting_depth(plan, Address(20, 0), Address(20, 2)) == 6
    assert parting_depth(plan, Address(20, 0), Address(20, 15)) == 0
    assert parting_depth(plan, Address(12, 3), Address(20, 3)) == 12
    assert parting_depth(plan, Address(7, 2), Address(20, 7)) == 6
    counts = np.unique(leaf_parting_depths(plan), return_counts=True)
    assert dict(zip(*map(np.ndarray.tolist, counts), strict=True)) == {0: 128, 3: 64, 6: 32, 9: 16, 20: 16}


@pytest.mark.parametrize("name", SMALL_PLANS)
@clause("ORACLE-6")
def test_every_pair_of_nodes_by_simulation(name):
    plan = SMALL_PLANS[name]
    chain, start = affine_chain(plan, DATA), random_root()
    states = simulate(plan, DATA, 40_000, 1, seed=11).states
    for a in nodes_of(plan):
        for b in nodes_of(plan)[::4]:
            expected = node_covariance(plan, chain, start, a, b)
            assert (
                z_of_covariance(states[a.depth][:, a.index, 0], states[b.depth][:, b.index, 0], expected) < Z_BOUND
            ), (a, b)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("name", SMALL_PLANS)
@clause("ORACLE-7", "ORACLE-8")
def test_matrix_by_parting_depth_equals_propagation(name, depth):
    plan = SMALL_PLANS[name]
    chain = affine_chain(plan, DATA)
    for start in (given_node(np.zeros(1), depth), random_root() if depth == 0 else given_node(np.ones(1), depth)):
        matrix, levels = leaf_covariance_matrix(plan, chain, start), level_covariances(plan, chain, start)
        # 1e-14: products of at most twenty factors near 1, in another order.
        np.testing.assert_allclose(matrix, levels[-1], rtol=1e-14, atol=1e-16)
        np.testing.assert_allclose(np.diag(matrix), node_variances(chain, start)[-1], rtol=1e-14)
        assert np.linalg.eigvalsh(matrix).min() > -1e-15


@clause("ORACLE-6", "ORACLE-8")
def test_intermediate_levels_equal_node_covariances():
    plan = SMALL_PLANS["cps"]
    chain, start = affine_chain(plan, DATA), random_root()
    for d, level in enumerate(level_covariances(plan, chain, start)):
        found = [
            [node_covariance(plan, chain, start, Address(d, i), Address(d, j)) for j in range(len(level))]
            for i in range(len(level))
        ]
        np.testing.assert_allclose(np.array(found), level, rtol=1e-14, atol=1e-16)


@clause("ORACLE-6")
def test_roots_are_independent():
    plan = make_plan(4, splits=(0,), roots=2)
    chain = affine_chain(plan, DATA)
    assert node_covariance(plan, chain, random_root(), Address(4, 0, 0), Address(4, 0, 1)) == 0.0
    assert node_covariance(plan, chain, random_root(), Address(4, 0, 1), Address(4, 1, 1)) > 0.0


@clause("ORACLE-7")
def test_a_fixed_root_leaves_only_later_noise():
    plan = make_plan(spread=float("inf"))
    chain = affine_chain(plan, DATA)
    fixed, drawn = given_node(np.zeros(1)), random_root()
    assert leaf_covariance(plan, chain, fixed, 0) == 0.0
    assert leaf_covariance(plan, chain, drawn, 0) > 0.0
    assert leaf_covariance(plan, chain, fixed, 9) > leaf_covariance(plan, chain, fixed, 3) > 0.0


@clause("ORACLE-7")
def test_leaves_of_a_reference_rollout():
    elements, plan = 20_000, make_plan(6, ("flow_sde", 0.7), (0, 2, 4), 2, 1.0, "denoised")
    sampling = Sampling(KeyedNoise(3), (elements,))
    condition = TensorCondition({"none": torch.zeros(1, 1)})
    (tree,) = rollout(plan, ExactGaussian(DATA.mean, DATA.tau), Prompt(5, ""), condition, sampling)
    leaves = torch.stack([leaf.state for leaf in tree.root.leaves()]).numpy()
    chain = affine_chain(plan, DATA)
    expected = leaf_covariance_matrix(plan, chain, random_root())
    products = np.einsum("ie,je->eij", leaves - 0.7, leaves - 0.7)  # the leaf mean is 0.7
    assert z_of_mean(products, expected) < Z_BOUND


@clause("ORACLE-7")
def test_the_dense_tree_by_simulation():
    plan = make_plan(splits=DENSE)
    chain, start = affine_chain(plan, DATA), given_node(np.zeros(1))
    leaves = simulate(plan, DATA, 20_000, 1, seed=5, root=np.zeros(1)).states[-1][..., 0]
    expected = leaf_covariance_matrix(plan, chain, start)
    centred = leaves - leaves.mean(axis=0)
    assert z_of_mean(centred[:, :, None] * centred[:, None, :], expected) < Z_BOUND


def test_wrong_nodes_are_refused_by_name():
    plan = make_plan(4, splits=(0, 2), roots=2)
    chain = affine_chain(plan, DATA)
    with pytest.raises(InputError, match=r"node.index = 4: must be in 0..3 at depth 4"):
        node_covariance(plan, chain, random_root(), Address(4, 4), Address(4, 0))
    with pytest.raises(InputError, match=r"node.depth = 5: must be in 0..4"):
        node_covariance(plan, chain, random_root(), Address(4, 0), Address(5, 0))
    with pytest.raises(InputError, match=r"node.root = 2"):
        node_covariance(plan, chain, random_root(), Address(4, 0, 2), Address(4, 0))
    with pytest.raises(InputError, match=r"below one node of depth 1"):
        node_covariance(plan, chain, given_node(np.zeros(1), 1), Address(4, 0), Address(4, 3))
    with pytest.raises(InputError, match=r"node.root = 1"):
        node_covariance(plan, chain, given_node(np.zeros(1), 1), Address(4, 0), Address(4, 0, 1))
