"""Clauses of spec/normalization.md."""

import math
from dataclasses import replace

import pytest
import torch
from helpers_spec import build_tree, close, f64, load_examples, small_plan

from branchgrpo.conformance.clauses import clause
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.normalization import normalize, standard_deviation, unclipped_advantages
from branchgrpo.reference.options import Normalization
from branchgrpo.reference.protocols import Prompt

EXAMPLE = load_examples("normalization")


def flat(values, prompt=0, root=0):
    """A tree whose leaves have the given values, one list or number a leaf."""
    tree = build_tree(small_plan((0,), steps=1, branching=len(values)), prompt=Prompt(prompt, ""), root=root)
    rows = [v if isinstance(v, list) else [v] for v in values]
    fused = {leaf: f64(row) for leaf, row in zip(tree.root.leaves(), rows, strict=True)}
    return tree, {tree.root: f64(rows).mean(dim=0)} | fused


def single(value, prompt, root):
    """A tree without a split: one leaf."""
    tree = build_tree(small_plan((), steps=1), prompt=Prompt(prompt, ""), root=root)
    return tree, dict.fromkeys(tree.root.walk(), f64([value]))


def leaves_of(trees, advantages):
    return torch.stack([advantages[leaf] for tree in trees for leaf in tree.root.leaves()])


def advantages_of(values, weights=(1.0,), **options):
    tree, fused = flat(values)
    return leaves_of([tree], normalize([tree], fused, weights, Normalization(**options)))


@clause("NORM-1", "NORM-3")
@pytest.mark.parametrize(("example", "bessel"), [("bessel", True), ("population", False)])
def test_the_example_z_scores(example, bessel):
    e = EXAMPLE[example]
    close(advantages_of(e["values"], bessel=bessel), e["advantages"])
    close(standard_deviation(f64(e["values"]), bessel), e["std"])
    if "mean" in e:
        close(f64(e["values"]).mean(), e["mean"])


@clause("NORM-5", "NORM-6")
def test_the_example_of_two_rewards():
    e = EXAMPLE["normalize_then_sum"]
    tree, values = flat(e["values"])
    unclipped = unclipped_advantages([tree], values, e["weights"], Normalization())
    close(leaves_of([tree], unclipped), e["unclipped"])
    close(advantages_of(e["values"], e["weights"]), e["advantages"])
    e = EXAMPLE["sum_then_normalize"]
    close(advantages_of(e["values"], e["weights"], order="sum_then_normalize"), e["advantages"])


@clause("NORM-4")
def test_the_example_of_values_that_are_equal_to_rounding():
    assert advantages_of(EXAMPLE["degenerate"]["equal"]).tolist() == [0.0, 0.0, 0.0]
    found = advantages_of(EXAMPLE["degenerate"]["distinct"], eps=0.0)
    # The mean is rounded to 2⁻⁵³ of the values, 2⁻³⁰ of their spread.
    torch.testing.assert_close(found, f64([-1.0, 2.0, -1.0]) / math.sqrt(3.0), rtol=2.0**-28, atol=0.0)


@clause("NORM-4")
def test_the_degenerate_rule_is_relative_and_sharp():
    for scale in (1e-12, 1.0, 1e12):
        at = advantages_of([scale, scale * (1 + 2.0**-40 / (1 - 2.0**-40) * 0.999)])
        above = advantages_of([scale, scale * (1 + 2.0**-39)], eps=0.0)
        assert at.tolist() == [0.0, 0.0]
        # The mean is rounded to 2⁻⁵³ of the values, 2⁻¹⁴ of their spread.
        torch.testing.assert_close(above, f64([-1.0, 1.0]) * math.sqrt(0.5), rtol=2.0**-12, atol=0.0)
    assert advantages_of([0.0, 0.0]).tolist() == [0.0, 0.0]
    assert advantages_of([3.0]).tolist() == [0.0]
    assert advantages_of([-1e-300, 1e-300], eps=0.0).abs().min() > 0.7


@clause("NORM-4", "NORM-5")
def test_a_degenerate_reward_model_leaves_the_other_one_alone():
    values = [[1.0, 0.1], [2.0, 0.1], [4.0, 0.1]]
    close(advantages_of(values, (1.0, 100.0)), EXAMPLE["bessel"]["advantages"])


@clause("NORM-1")
def test_every_depth_is_normalised_by_itself_and_nothing_else():
    tree = build_tree(small_plan((0, 1), steps=3))
    values = {node: f64([float(node.index + 10 * node.depth**2)]) for node in tree.root.walk()}
    advantages = normalize([tree], values, (1.0,), Normalization())
    assert float(advantages[tree.root]) == 0.0
    for depth in (1, 2, 3):
        row = torch.cat([values[node] for node in tree.level(depth)])
        expected = (row - row.mean()) / (row.std() + 1e-8)
        close(torch.stack([advantages[node] for node in tree.level(depth)]), expected.tolist())


@clause("NORM-1")
def test_eps_is_added_to_the_std():
    close(advantages_of([0.0, 2.0], eps=0.5), [-1 / (math.sqrt(2) + 0.5), 1 / (math.sqrt(2) + 0.5)])
    tree, values = flat([1.0, 2.0])
    assert all(a.dtype == torch.float64 for a in normalize([tree], values, (1.0,), Normalization()).values())
    with pytest.raises(OptionError, match=r"normalization.eps"):
        Normalization(eps=-1e-8)


def batch():
    """Two prompts; the first has two roots whose values differ in mean and spread."""
    parts = [flat([1.0, 3.0], 5, 0), flat([10.0, 20.0], 5, 1), flat([0.0, 6.0], 6, 0)]
    trees = [tree for tree, _ in parts]
    return trees, {node: value for _, values in parts for node, value in values.items()}


SETS = {
    "tree": [[1.0, 3.0], [10.0, 20.0], [0.0, 6.0]],
    "prompt": [[1.0, 3.0, 10.0, 20.0], [1.0, 3.0, 10.0, 20.0], [0.0, 6.0]],
    "batch": [[1.0, 3.0, 10.0, 20.0, 0.0, 6.0]] * 3,
}


@clause("NORM-2", "NORM-3")
@pytest.mark.parametrize("mean_scope", ["tree", "prompt"])
@pytest.mark.parametrize("std_scope", ["tree", "prompt", "batch"])
@pytest.mark.parametrize("bessel", [True, False])
def test_scopes_of_mean_and_std(mean_scope, std_scope, bessel):
    trees, values = batch()
    options = Normalization(mean_scope=mean_scope, std_scope=std_scope, bessel=bessel, eps=0.0, clip=math.inf)
    found = leaves_of(trees, normalize(trees, values, (1.0,), options))
    expected = []
    for own, mean_set, std_set in zip(SETS["tree"], SETS[mean_scope], SETS[std_scope], strict=True):
        std = f64(std_set).std(correction=int(bessel))
        expected += ((f64(own) - f64(mean_set).mean()) / std).tolist()
    close(found, expected)


@clause("NORM-2")
def test_scopes_go_by_prompt_id_whatever_the_order_of_trees():
    trees, values = batch()
    options = Normalization(mean_scope="prompt", std_scope="prompt")
    first = normalize(trees, values, (1.0,), options)
    second = normalize([trees[1], trees[2], trees[0]], values, (1.0,), options)
    for node, a in first.items():
        torch.testing.assert_close(a, second[node], rtol=1e-14, atol=0.0)
    alone = normalize(trees[2:], {n: values[n] for n in trees[2].root.walk()}, (1.0,), options)
    assert all(torch.equal(a, first[node]) for node, a in alone.items())


@clause("NORM-2", "PLAN-9")
def test_flow_grpo_compares_the_prompts_roots():
    parts = [single(value, 1, root) for root, value in enumerate((1.0, 2.0, 4.0))]
    trees, values = [t for t, _ in parts], {n: v for _, vs in parts for n, v in vs.items()}
    tree_scope = leaves_of(trees, normalize(trees, values, (1.0,), Normalization()))
    assert tree_scope.tolist() == [0.0, 0.0, 0.0]
    pooled = Normalization(mean_scope="prompt", std_scope="batch")
    close(leaves_of(trees, normalize(trees, values, (1.0,), pooled)), EXAMPLE["bessel"]["advantages"])


@clause("NORM-4", "NORM-2")
def test_either_degenerate_set_gives_zero():
    parts = [flat([1.0, 1.0], 1, 0), flat([5.0, 9.0], 1, 1)]
    trees, values = [t for t, _ in parts], {n: v for _, vs in parts for n, v in vs.items()}
    mixed = leaves_of(trees, normalize(trees, values, (1.0,), Normalization(mean_scope="prompt", std_scope="tree")))
    assert mixed[:2].tolist() == [0.0, 0.0]
    assert bool((mixed[2:] != 0).all())
    other = leaves_of(trees, normalize(trees, values, (1.0,), Normalization(mean_scope="tree", std_scope="prompt")))
    assert other[:2].tolist() == [0.0, 0.0]
    assert bool((other[2:] != 0).all())


@clause("NORM-6")
def test_the_sum_is_clipped_once():
    values = [[float(i == 0), float(i == 0)] for i in range(32)]
    tree, fused = flat(values)
    term = float(unclipped_advantages([tree], fused, (1.0, 0.0), Normalization())[tree.root.leaves()[0]])
    assert term > 5.0
    assert advantages_of(values, (1.0, -1.0))[0] == 0.0
    assert advantages_of(values, (1.0, -0.5))[0] == pytest.approx(0.5 * term, rel=1e-12)
    assert advantages_of(values, (1.0, 1.0))[0] == 5.0
    assert advantages_of(values, (-1.0, -1.0))[0] == -5.0
    assert advantages_of(values, (1.0, 1.0), clip=math.inf)[0] == pytest.approx(2 * term, rel=1e-12)
    for clip in (0.0, -1.0, math.nan):
        with pytest.raises(OptionError, match=r"normalization.clip"):
            Normalization(clip=clip)


@clause("NORM-5", "ERR-4")
@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0, 3.0), (1.0, math.nan), (1.0, math.inf)])
def test_weights_are_finite_and_one_a_reward_model(weights):
    tree, values = flat([[1.0, 2.0], [2.0, 1.0]])
    with pytest.raises(OptionError, match="weights"):
        normalize([tree], values, weights, Normalization())


@clause("NORM-5")
def test_the_scale_of_a_reward_matters_only_if_sums_come_first():
    values, scaled = [[1.0, 5.0], [2.0, 1.0], [4.0, 2.0]], [[1.0, 500.0], [2.0, 100.0], [4.0, 200.0]]
    torch.testing.assert_close(advantages_of(values, (1.0, 1.0)), advantages_of(scaled, (1.0, 1.0)), rtol=1e-7, atol=0)
    order = {"order": "sum_then_normalize"}
    assert not torch.allclose(
        advantages_of(values, (1.0, 1.0), **order), advantages_of(scaled, (1.0, 1.0), **order), rtol=1e-2
    )
    close(advantages_of(values, (2.0, 6.0), eps=0.0, **order), advantages_of(values, (1, 3), eps=0.0, **order).tolist())


@clause("NORM-7")
def test_shift_and_scale_of_rewards_change_nothing():
    rows = f64([0.3, -1.2, 2.2, 0.9])
    base = advantages_of(rows.tolist(), eps=0.0)
    for scale, shift in ((1e-6, 0.0), (1e6, 3.0), (2.0, -100.0)):
        # Subtracting a shift of 100 from values of size 1 costs about 100·2⁻⁵³ a value.
        torch.testing.assert_close(
            advantages_of((scale * rows + shift).tolist(), eps=0.0), base, rtol=1e-12, atol=1e-12
        )


@clause("NORM-7")
@pytest.mark.parametrize("count", [2, 5, 26, 27])
def test_advantages_are_bounded(count):
    found = advantages_of([1.0] + [0.0] * (count - 1), eps=0.0, clip=math.inf)
    assert float(found.max()) == pytest.approx((count - 1) / math.sqrt(count), rel=1e-12)
    assert (float(found.max()) <= 5.0) == (count <= 26)
    assert replace(Normalization(), eps=0.0).clip == 5.0
