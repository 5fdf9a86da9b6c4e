"""Clauses of spec/pruning.md."""

import pytest
import torch
from helpers_spec import (
    CONDITION,
    PROMPT,
    Network,
    Toy,
    build_tree,
    leaf_rewards,
    load_examples,
    small_plan,
    unchecked,
)

from branchgrpo.conformance.clauses import clause
from branchgrpo.reference.depth_window import window_at
from branchgrpo.reference.errors import OptionError, PlanError
from branchgrpo.reference.fusion import fuse
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.normalization import normalize, unclipped_advantages
from branchgrpo.reference.objective import objective, trainable_edges
from branchgrpo.reference.options import DepthWindow, ExtremeB, Fusion, Normalization, Objective, ParentTop1
from branchgrpo.reference.presets import preset
from branchgrpo.reference.pruning import extreme_leaves, leaf_keys, parent_top1_leaves, prune, ranked
from branchgrpo.reference.reward import score
from branchgrpo.reference.rollout import Sampling, rollout
from branchgrpo.reference.types import LeafOutput, Reduction

EXAMPLE = load_examples("pruning")
PLAN = small_plan((0, 1), steps=4)


def keyed(rewards, plan=PLAN):
    """A tree with the keys of its leaves, one reward model of weight 1."""
    tree = build_tree(plan)
    values = fuse(tree, leaf_rewards(tree, rewards), Fusion())
    return tree, leaf_keys([tree], values, (1.0,), Normalization())


def kept_by_depth(tree, kept):
    return [[edge.index for edge in tree.level(d) if edge in kept] for d in range(1, tree.plan.steps + 1)]


@clause("PRUNE-2")
def test_the_example_of_ties():
    tree, keys = keyed(EXAMPLE["ties"]["rewards"])
    assert [leaf.index for leaf in ranked(tree.root.leaves(), keys)] == EXAMPLE["ties"]["order"]


@clause("PRUNE-3")
def test_the_example_of_parent_top1():
    e = EXAMPLE["parent_top1"]
    tree, keys = keyed(e["rewards"])
    assert sorted(leaf.index for leaf in parent_top1_leaves(tree, keys)) == e["stays"]
    assert kept_by_depth(tree, prune([tree], keys, (ParentTop1(),), 0)) == e["kept"]
    dropped = prune([tree], keys, (ParentTop1(drop_split_edges=True),), 0)
    assert kept_by_depth(tree, dropped) == e["kept_without_split_edges"]


@clause("PRUNE-4")
def test_the_example_of_extreme_1():
    e = EXAMPLE["extreme_1"]
    tree, keys = keyed(e["rewards"])
    assert sorted(leaf.index for leaf in extreme_leaves(tree, keys, e["b"])) == e["stays"]
    assert kept_by_depth(tree, prune([tree], keys, (ExtremeB(e["b"]),), 0)) == e["kept"]
    assert kept_by_depth(tree, prune([tree], keys, (ExtremeB(1, drop_split_edges=True),), 0))[1] == [2, 3]


@clause("PRUNE-5")
@pytest.mark.parametrize("example", ["depth_window", "depth_window_up", "depth_window_cut"])
def test_the_example_windows(example):
    e = EXAMPLE[example]
    rule = DepthWindow(e["start"], e["size"], e["period"], e["direction"], e.get("stop"))
    for iteration, first, last in e["positions"]:
        assert window_at(rule, e["steps"], iteration) == range(first, last + 1)


@clause("PRUNE-5")
def test_the_papers_window_is_the_preset():
    e = EXAMPLE["depth_window"]
    assert preset("branchgrpo-deppru").pruning == (DepthWindow(e["start"], e["size"], e["period"], e["direction"]),)


@clause("PRUNE-5")
def test_a_depth_window_drops_split_edges_too_and_counts_child_depths():
    tree, keys = keyed([0.1, 0.2, 0.3, 0.4])
    assert kept_by_depth(tree, prune([tree], keys, (DepthWindow(2, 2, 5),), 0)) == [[0, 1], [], [], [0, 1, 2, 3]]
    assert kept_by_depth(tree, prune([tree], keys, (DepthWindow(2, 2, 5),), 5)) == [[0, 1], [0, 1, 2, 3], [], []]


@clause("PRUNE-5", "ERR-2")
@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (DepthWindow(5, 1), "start"),
        (DepthWindow(4, 2), "stop"),
        (DepthWindow(1, 1, stop=5), "stop"),
        (DepthWindow(2, 2, direction=-1, stop=3), "stop"),
    ],
)
def test_windows_outside_the_plan_are_refused(rule, field):
    with pytest.raises(OptionError, match=f"depth_window.{field}"):
        window_at(rule, 4, 0)


@clause("PRUNE-5", "ERR-2", "ERR-5")
@pytest.mark.parametrize(
    "options",
    [
        {"start": 0},
        {"start": 1, "size": 0},
        {"start": 1, "period": 0},
        {"start": 1, "direction": 2},
        {"start": 1, "stop": 0},
    ],
)
def test_windows_that_are_none_are_refused(options):
    with pytest.raises(OptionError, match="depth_window"):
        unchecked(DepthWindow, **options)
    with pytest.raises(OptionError, match="iteration"):
        window_at(DepthWindow(1), 4, -1)


@clause("PRUNE-2")
def test_keys_are_the_reward_or_the_unclipped_advantage():
    tree = build_tree(PLAN)
    one = fuse(tree, leaf_rewards(tree, [0.5, 0.1, 0.2, 0.9]), Fusion())
    keys = leaf_keys([tree], one, (-2.0,), Normalization())
    assert [keys[leaf] for leaf in tree.root.leaves()] == pytest.approx([-1.0, -0.2, -0.4, -1.8], rel=1e-15)
    two = fuse(tree, leaf_rewards(tree, [[0.5, 3.0], [0.1, 9.0], [0.2, 1.0], [0.9, 1.0]]), Fusion())
    options = Normalization(clip=0.1)
    keys = leaf_keys([tree], two, (2.0, 1.0), options)
    unclipped = unclipped_advantages([tree], two, (2.0, 1.0), options)
    assert [keys[leaf] for leaf in tree.root.leaves()] == [float(unclipped[leaf]) for leaf in tree.root.leaves()]
    assert max(keys.values()) > 0.1


@clause("PRUNE-3", "PRUNE-2")
@pytest.mark.parametrize(("rewards", "stays"), [([0.0, 1.0, 1.0, 0.0], [1, 2]), ([1.0, 1.0, 0.0, 0.0], [0, 2])])
def test_the_better_child_stays_and_the_first_among_equals(rewards, stays):
    tree, keys = keyed(rewards)
    assert sorted(leaf.index for leaf in parent_top1_leaves(tree, keys)) == stays


@clause("PRUNE-3", "PRUNE-4", "ERR-2")
@pytest.mark.parametrize("rule", [ParentTop1(), ExtremeB(1)])
def test_width_pruning_needs_a_split(rule):
    tree, keys = keyed([1.0], small_plan((), steps=3))
    with pytest.raises(PlanError, match="splits"):
        prune([tree], keys, (rule,), 0)


@clause("PRUNE-3")
def test_without_anything_after_the_last_split_only_dropping_split_edges_has_an_effect():
    plan = small_plan((0, 1), steps=2)
    tree, keys = keyed([0.1, 0.2, 0.3, 0.4], plan)
    assert prune([tree], keys, (ParentTop1(),), 0) == set(tree.edges())
    kept = prune([tree], keys, (ParentTop1(drop_split_edges=True),), 0)
    assert kept_by_depth(tree, kept) == [[0, 1], [1, 3]]


@clause("PRUNE-4")
def test_extreme_b_takes_a_tree_at_a_time_and_2b_of_n_keeps_all():
    first, keys = keyed([0.1, 0.2, 0.3, 0.4])
    second, more = keyed([9.0, 8.0, 7.0, 6.0])
    keys |= more
    kept = prune([first, second], keys, (ExtremeB(1),), 0)
    assert kept_by_depth(first, kept)[3] == [0, 3]
    assert kept_by_depth(second, kept)[3] == [0, 3]
    for b in (2, 3, 100):
        assert prune([first], keys, (ExtremeB(b),), 0) == set(first.edges())
    for b in (0, -1):
        with pytest.raises(OptionError, match=r"extreme_b.b"):
            ExtremeB(b)


RULES = (ParentTop1(), ExtremeB(1, drop_split_edges=True), DepthWindow(2, 1, 1))


@clause("PRUNE-1")
def test_rules_commute_are_idempotent_and_change_nothing_else():
    plan = small_plan((0, 2), steps=5, output=LeafOutput.SAMPLE)
    (tree,) = rollout(plan, Network(), PROMPT, CONDITION, Sampling(KeyedNoise(0), (2, 3)))
    values = fuse(tree, score(tree, [Toy()]), Fusion())
    advantages = normalize([tree], values, (1.0,), Normalization())
    keys = leaf_keys([tree], values, (1.0,), Normalization())
    before = {n: (n.state.clone(), values[n].clone(), advantages[n].clone(), keys.get(n)) for n in tree.root.walk()}
    kept = prune([tree], keys, RULES, 3)
    assert kept == prune([tree], keys, RULES[::-1], 3) == prune([tree], keys, RULES + RULES, 3)
    assert kept == set.intersection(*(prune([tree], keys, (rule,), 3) for rule in RULES))
    for node, (state, value, advantage, key) in before.items():
        assert torch.equal(node.state, state)
        assert torch.equal(values[node], value)
        assert torch.equal(advantages[node], advantage)
        assert keys.get(node) == key


@clause("PRUNE-6", "OBJ-4", "PRUNE-1")
@pytest.mark.parametrize("reduction", ["edge_mean", "depth_mean"])
@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
def test_the_pruned_gradient_is_the_kept_edges_gradient_over_their_normaliser(rule, reduction):
    plan = small_plan((0, 1), steps=4, output=LeafOutput.DENOISED)
    model, options = Network(), Objective(reduction=reduction)
    (tree,) = rollout(plan, model, PROMPT, CONDITION, Sampling(KeyedNoise(0), (2, 3)))
    values = fuse(tree, score(tree, [Toy()]), Fusion())
    advantages = normalize([tree], values, (1.0,), Normalization())
    keys = leaf_keys([tree], values, (1.0,), Normalization())

    def gradient(kept, how=options):
        j = objective([tree], model, [CONDITION], advantages, kept, how, Reduction.MEAN)
        return torch.cat([g.flatten() for g in torch.autograd.grad(j, list(model.parameters()))])

    kept = prune([tree], keys, (rule,), 0)
    edges = trainable_edges(tree, kept)
    assert 0 < len(edges) < len(trainable_edges(tree, set(tree.edges())))
    alone = {edge: gradient({edge}) for edge in edges}
    if reduction == "edge_mean":
        expected = torch.stack(list(alone.values())).mean(dim=0)
    else:
        depths = sorted({edge.depth for edge in edges})
        expected = torch.stack([torch.stack([alone[e] for e in edges if e.depth == d]).mean(0) for d in depths]).mean(0)
    torch.testing.assert_close(gradient(kept), expected, rtol=1e-11, atol=1e-15)
    assert not torch.allclose(gradient(kept), gradient(set(tree.edges())), rtol=1e-3)
