"""Clauses of spec/fusion.md."""

import pytest
import torch
from helpers_spec import build_tree, close, f64, leaf_rewards, load_examples, small_plan

from branchgrpo.conformance.clauses import clause
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.fusion import (
    child_softmax_weights,
    effective_sample_size,
    fuse,
    leaf_weights,
    path_log_probabilities,
    path_softmax_weights,
    standardised_weights,
)
from branchgrpo.reference.options import Fusion
from branchgrpo.reference.types import LeafOutput

EXAMPLE = load_examples("fusion")
TREE = EXAMPLE["tree"]
KINDS = ("path_softmax", "child_softmax", "standardised")


def example_tree():
    flat = [p for pair in TREE["grandchildren"] for p in pair]
    tree = build_tree(small_plan((0, 1), steps=2), [TREE["children"], flat])
    return tree, leaf_rewards(tree, TREE["rewards"])


def random_tree(seed, plan=None):
    """Log-probabilities spread over tens of nats, as sums over latent elements are."""
    plan = plan or small_plan((0, 2, 3), steps=5, branching=3)
    generator = torch.Generator().manual_seed(seed)
    log_probs = [(20 * torch.randn(n, generator=generator, dtype=torch.float64)).tolist() for n in plan.level_sizes[1:]]
    tree = build_tree(plan, log_probs)
    rewards = torch.randn(plan.leaves, 2, generator=generator, dtype=torch.float64).tolist()
    return tree, leaf_rewards(tree, rewards)


@clause("FUSE-1", "FUSE-2")
def test_the_example_path_softmax():
    tree, rewards = example_tree()
    e = EXAMPLE["path_softmax"]
    close(path_log_probabilities(tree.root), e["path"])
    close(path_softmax_weights(tree.root, TREE["beta"]), e["weights"])
    values = fuse(tree, rewards, Fusion(beta=TREE["beta"]))
    close(values[tree.root], [e["value"]])
    close(torch.cat([values[child] for child in tree.level(1)]), e["child_values"])
    close(effective_sample_size(f64(e["weights"])), e["effective_sample_size"])


@clause("FUSE-4")
def test_the_example_child_softmax():
    tree, rewards = example_tree()
    e = EXAMPLE["child_softmax"]
    close(child_softmax_weights(tree.root, TREE["beta"]), e["weights"])
    close(fuse(tree, rewards, Fusion("child_softmax", TREE["beta"]))[tree.root], [e["value"]])


@clause("FUSE-5")
def test_the_example_standardised():
    tree, rewards = example_tree()
    e = EXAMPLE["standardised"]
    close(standardised_weights(tree.root, TREE["beta"]), e["weights"])
    close(fuse(tree, rewards, Fusion("standardised", TREE["beta"]))[tree.root], [e["value"]])


@clause("FUSE-6")
@pytest.mark.parametrize("kind", KINDS)
def test_beta_zero_is_uniform_for_every_kind(kind):
    tree, rewards = example_tree()
    close(fuse(tree, rewards, Fusion(kind, 0.0))[tree.root], [EXAMPLE["uniform"]["value"]])
    tree, rewards = random_tree(0)
    for node in tree.root.walk():
        count = len(node.leaves())
        close(leaf_weights(node, Fusion(kind, 0.0)), [1.0 / count] * count)


@clause("FUSE-6")
def test_values_of_uniform_fusion_have_the_variance_of_dependent_leaves():
    """FUSE-6: the formula against the covariance matrix of leaves that share noise at each depth."""
    generator = torch.Generator().manual_seed(1)
    plan = small_plan((0, 2), steps=4, branching=3)
    # shares[d] is the variance that a node of depth d adds to all its leaves.
    shares = torch.rand(5, generator=generator, dtype=torch.float64)
    count = plan.leaves
    covariance = torch.zeros(count, count, dtype=torch.float64)
    for depth, size in enumerate(plan.level_sizes):
        block = torch.arange(count) // (count // size)
        covariance += shares[depth] * (block[:, None] == block[None, :])
    exact = covariance.mean()
    parted = {step: shares[: step + 1].sum() for step in plan.splits}
    total = shares.sum()
    for step in plan.splits:
        below = 1
        for later in plan.splits:
            below *= plan.branching[later] if later > step else 1
        total = total + (plan.branching[step] - 1) * below * parted[step]
    close(exact, (total / count).item())


@clause("FUSE-1")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", [0.0, 0.7, 40.0])
def test_values_are_convex_combinations_and_leaves_keep_their_reward(kind, beta):
    tree, rewards = random_tree(2)
    values = fuse(tree, rewards, Fusion(kind, beta))
    for node in tree.root.walk():
        below = torch.stack([rewards[leaf] for leaf in node.leaves()])
        weights = leaf_weights(node, Fusion(kind, beta))
        assert weights.dtype == values[node].dtype == torch.float64
        assert bool((weights >= 0).all())
        # N·2⁻⁵³ is the rounding of a sum of N terms that add to 1.
        assert abs(float(weights.sum()) - 1.0) <= len(weights) * 2.0**-52
        slack = len(weights) * 2.0**-52 * below.abs().amax(dim=0)
        assert bool((values[node] >= below.amin(dim=0) - slack).all())
        assert bool((values[node] <= below.amax(dim=0) + slack).all())
        if len(below) == 1:
            assert torch.equal(values[node], below[0])


@clause("FUSE-2")
def test_no_weight_overflows():
    tree = build_tree(small_plan((0,), steps=1), [[-1e6, 1e6]])
    assert path_softmax_weights(tree.root, 100.0).tolist() == [0.0, 1.0]
    tree = build_tree(small_plan((0,), steps=1), [[-1e6, -1e6]])
    assert path_softmax_weights(tree.root, 100.0).tolist() == [0.5, 0.5]


@clause("FUSE-2", "ERR-2")
@pytest.mark.parametrize("beta", [-1.0, float("nan"), float("inf")])
def test_beta_is_finite_and_not_negative(beta):
    with pytest.raises(OptionError, match=r"fusion.beta"):
        Fusion(beta=beta)


def nested(node, beta):
    """Weights by FUSE-3: children scored by their log-probability and the evidence of their subtree."""
    if not node.children:
        return f64([1.0]), f64(0.0)
    parts = [nested(child, beta) for child in node.children]
    own = torch.stack([f64(0.0) if c.log_prob is None else beta * c.log_prob for c in node.children])
    scores = own + torch.stack([evidence for _, evidence in parts])
    outer = torch.softmax(scores, dim=0)
    return torch.cat([w * inner for w, (inner, _) in zip(outer, parts, strict=True)]), torch.logsumexp(scores, dim=0)


@clause("FUSE-3")
@pytest.mark.parametrize("beta", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("output", LeafOutput)
def test_the_path_softmax_is_a_nested_softmax_with_the_subtrees_evidence(beta, output):
    tree, _ = random_tree(3, small_plan((0, 2, 3), steps=5, branching=3, output=output))
    for node in tree.root.walk():
        torch.testing.assert_close(path_softmax_weights(node, beta), nested(node, beta)[0], rtol=1e-11, atol=1e-14)


@clause("FUSE-3")
def test_the_example_evidence():
    tree, _ = example_tree()
    scores = torch.stack([child.log_prob + nested(child, 1.0)[1] for child in tree.level(1)])
    close(scores, EXAMPLE["evidence"]["scores"])
    close(torch.softmax(scores, dim=0), EXAMPLE["evidence"]["weights"])
    weights = path_softmax_weights(tree.root, 1.0)
    close(weights.reshape(2, 2).sum(dim=1), EXAMPLE["evidence"]["weights"])


@clause("FUSE-4")
def test_child_softmax_ignores_evidence_and_skips_edges_without_a_log_probability():
    plan = small_plan((0,), steps=3, output=LeafOutput.DENOISED)
    tree = build_tree(plan, [[-1.0, -2.0], [5.0, -9.0], [0.0, 0.0]])
    assert all(leaf.log_prob is None for leaf in tree.root.leaves())
    close(child_softmax_weights(tree.root, 1.0), torch.softmax(f64([-1.0, -2.0]), 0).tolist())
    assert not torch.allclose(child_softmax_weights(tree.root, 1.0), path_softmax_weights(tree.root, 1.0))


@clause("FUSE-5")
def test_standardised_is_uniform_for_one_leaf_or_zero_spread_and_reads_no_scale():
    tree = build_tree(small_plan((0,), steps=1), [[-3.0, -3.0]])
    assert standardised_weights(tree.root, 5.0).tolist() == [0.5, 0.5]
    assert standardised_weights(tree.root.leaves()[0], 5.0).tolist() == [1.0]
    first = build_tree(small_plan((0,), steps=1, branching=3), [[-3.0, -1.0, 0.5]])
    second = build_tree(small_plan((0,), steps=1, branching=3), [[-30.0, -10.0, 5.0]])
    close(standardised_weights(first.root, 1.0), standardised_weights(second.root, 1.0).tolist())


@clause("FUSE-7")
def test_effective_sample_size():
    assert float(effective_sample_size(f64([0.25] * 4))) == 4.0
    assert float(effective_sample_size(f64([1.0, 0.0]))) == 1.0
