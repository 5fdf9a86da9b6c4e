"""Clauses of spec/plan.md and spec/schedule.md."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers_spec import CONDITION, CPS, FLOW, PROMPT, SDE, Network, Scaled, Toy, build_tree, load_examples, small_plan

from branchgrpo.conformance.clauses import clause
from branchgrpo.reference.counts import count, count_plan
from branchgrpo.reference.errors import OptionError, PlanError
from branchgrpo.reference.fusion import fuse
from branchgrpo.reference.method import Method, tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.normalization import normalize
from branchgrpo.reference.options import DepthWindow, ExtremeB, Fusion, Normalization, ParentTop1
from branchgrpo.reference.plan import Plan, branching_from_splits
from branchgrpo.reference.presets import PRESETS, preset
from branchgrpo.reference.pruning import prune
from branchgrpo.reference.reward import score
from branchgrpo.reference.rollout import Sampling, rollout
from branchgrpo.reference.schedule import shift_sigma, shifted_schedule
from branchgrpo.reference.subsets import subset_size, trained_subset
from branchgrpo.reference.types import ODE, Kernel, KernelKind, LeafOutput

PLAN, SCHEDULE = load_examples("plan"), load_examples("schedule")


@clause("PLAN-1")
def test_a_plan_holds_one_entry_a_step_and_refuses_other_lengths():
    plan = small_plan()
    assert (plan.steps, len(plan.sigmas), plan.roots) == (4, 5, 1)
    assert plan.deltas == (0.25, 0.25, 0.25, 0.25)
    for field in ("kernels", "branching", "spreads"):
        with pytest.raises(PlanError, match=rf"len\({field}\) = 3: must be T = 4"):
            replace(plan, **{field: getattr(plan, field)[:-1]})
    for roots in (0, -1, True):
        with pytest.raises(PlanError, match="roots"):
            replace(plan, roots=roots)


@clause("PLAN-1", "ROLL-1", "NOISE-3")
def test_every_root_grows_a_tree_of_its_own():
    plan = small_plan((0,), steps=2, roots=3)
    trees = rollout(plan, Scaled(), PROMPT, CONDITION, Sampling(KeyedNoise(0), (2,)))
    assert [tree.root_index for tree in trees] == [0, 1, 2]
    states = [node.state for tree in trees for node in tree.root.walk()]
    assert len(states) == 3 * 5
    assert all(not torch.equal(a, b) for i, a in enumerate(states) for b in states[:i])


@clause("PLAN-2", "ERR-2")
@pytest.mark.parametrize(("splits", "at"), [((0, 0), 1), ((0, 99), 1), ((-1,), 0), ((4,), 0)])
def test_split_steps_are_never_repaired(splits, at):
    with pytest.raises(PlanError, match=rf"splits\[{at}\]"):
        branching_from_splits(4, splits, 2)


@clause("PLAN-2")
def test_split_steps_name_where_the_tree_branches():
    assert branching_from_splits(5, (3, 0), 3) == (3, 1, 1, 3, 1)
    assert small_plan((0, 2)).splits == (0, 2)


@clause("PLAN-3", "KERN-5")
@pytest.mark.parametrize(
    ("kernel", "step"), [(ODE, 0), (Kernel(KernelKind.SDE, 0.0), 0), (Kernel(KernelKind.CPS, 0.0), 1), (CPS, 3)]
)
def test_a_deterministic_step_does_not_split(kernel, step):
    kernels = tuple(kernel if i == step else SDE for i in range(4))
    branching = tuple(2 if i == step else 1 for i in range(4))
    with pytest.raises(PlanError, match=rf"branching\[{step}\] = 2"):
        replace(small_plan(()), kernels=kernels, branching=branching)


@clause("PLAN-3")
@pytest.mark.parametrize("factor", [0, -1, True])
def test_branching_factors_are_integers_from_one(factor):
    with pytest.raises(PlanError, match=r"branching\[1\]"):
        replace(small_plan(()), branching=(1, factor, 1, 1))


@clause("PLAN-3")
@pytest.mark.parametrize("spread", [math.nan, -1.0, -math.inf])
def test_a_spread_is_in_zero_to_infinity_at_every_step(spread):
    with pytest.raises(PlanError, match=r"spreads\[2\]"):
        replace(small_plan((0,)), spreads=(4.0, 4.0, spread, 4.0))
    assert replace(small_plan((0,)), spreads=(0.0, math.inf, 1.0, 2.0)).spreads[0] == 0.0


@clause("PLAN-4", "PLAN-5")
def test_the_example_counts():
    example = PLAN["dense"]
    plan = tree_plan(example["steps"], SDE, splits=example["splits"], branching=example["branching"], spread=4.0)
    counts = count_plan(plan)
    assert list(plan.level_sizes) == example["level_sizes"]
    for name in ("leaves", "nodes", "edges", "denoiser_calls", "trained_edges", "trained_parents"):
        assert getattr(counts, name) == example[name], name
    assert (counts.nfe_nodes, counts.nfe_calls) == (example["nfe_nodes"], example["nfe_calls"])
    pruned = count_plan(plan, (ParentTop1(),))
    assert pruned.kept_edges == example["parent_top1_kept_edges"]
    assert pruned.kept_parents == example["parent_top1_kept_parents"]


@clause("PLAN-4")
@pytest.mark.parametrize("roots", [1, 3])
def test_counts_are_those_of_a_grown_tree_and_its_calls(roots):
    plan = small_plan((0, 2), branching=3, roots=roots)
    model = Scaled()
    trees = rollout(plan, model, PROMPT, CONDITION, Sampling(KeyedNoise(0), (1,)))
    counts = count_plan(plan)
    assert counts.nodes == sum(1 for tree in trees for _ in tree.root.walk())
    assert counts.edges == sum(len(tree.edges()) for tree in trees)
    assert counts.leaves == sum(len(tree.root.leaves()) for tree in trees)
    assert counts.denoiser_calls == len(model.calls)


@clause("PLAN-5")
@pytest.mark.parametrize("output", LeafOutput)
@pytest.mark.parametrize(
    "rules",
    [
        (),
        (ParentTop1(),),
        (ParentTop1(drop_split_edges=True),),
        (ExtremeB(1),),
        (ExtremeB(9),),
        (DepthWindow(2, 2, 1),),
        (ParentTop1(), DepthWindow(1, 1, 1)),
    ],
)
def test_pruned_counts_are_those_of_pruned_trees(output, rules):
    plan = small_plan((0, 2), steps=6, output=output)
    tree = build_tree(plan)
    keys = {leaf: float(leaf.index * 7 % 4) for leaf in tree.root.leaves()}
    for iteration in (0, 1, 9):
        kept = prune([tree], keys, rules, iteration)
        trained = [edge for edge in kept if edge.depth - 1 in plan.trainable_steps]
        counts = count_plan(plan, rules, iteration)
        assert counts.kept_edges == len(kept)
        assert counts.kept_parents == len({edge.parent for edge in kept})
        assert counts.trained_edges == len(trained)
        assert counts.trained_parents == len({edge.parent for edge in trained})


@clause("PLAN-5")
@pytest.mark.parametrize("rules", [(ParentTop1(), ExtremeB(1)), (ExtremeB(1, drop_split_edges=True),)])
def test_counts_that_a_reward_could_change_are_refused(rules):
    with pytest.raises(PlanError, match="pruning"):
        count_plan(small_plan((0, 1)), rules)
    assert count_plan(small_plan((0, 1)), (ExtremeB(2, drop_split_edges=True),)).kept_edges == 2 + 4 + 4 + 4


@clause("PLAN-6")
def test_under_denoised_the_last_step_is_an_ode_step_without_a_log_probability():
    plan = small_plan((0,), output=LeafOutput.DENOISED)
    assert plan.kernels[-1] == SDE
    assert plan.effective_kernels[-1] == ODE
    assert plan.stochastic_steps == plan.trainable_steps == (0, 1, 2)
    assert small_plan((0,)).trainable_steps == (0, 1, 2, 3)
    (tree,) = rollout(plan, Network(), PROMPT, CONDITION, Sampling(KeyedNoise(0), (2, 3)))
    assert all(leaf.log_prob is None and leaf.std == 0.0 for leaf in tree.root.leaves())


@clause("PLAN-6")
def test_under_denoised_a_split_at_the_last_step_is_refused():
    assert small_plan((3,)).splits == (3,)
    with pytest.raises(PlanError, match=r"branching\[3\] = 2"):
        small_plan((3,), output=LeafOutput.DENOISED)


@clause("PLAN-6")
def test_trained_steps_are_stochastic_and_named_once():
    assert small_plan((0,), trained_steps=(2, 0)).trainable_steps == (0, 2)
    for steps in ((0, 0), (4,), (-1,)):
        with pytest.raises(PlanError, match="trained_steps"):
            small_plan((0,), trained_steps=steps)
    with pytest.raises(PlanError, match=r"trained_steps\[0\] = 3"):
        small_plan((0,), output=LeafOutput.DENOISED, trained_steps=(3,))


@clause("PLAN-7")
@pytest.mark.parametrize("example", ["subset", "subset_least"])
def test_the_example_subsets(example):
    fraction, trainable, size = (PLAN[example][key] for key in ("fraction", "trainable", "size"))
    plan = tree_plan(trainable + 1, SDE, splits=(0,), branching=3, trained_fraction=fraction)
    assert len(plan.trainable_steps) == trainable
    assert subset_size(plan) == size
    assert all(len(trained_subset(plan, 0, 0, 1, 0, leaf)) == size for leaf in range(3))


@clause("PLAN-7", "NOISE-4")
def test_subsets_follow_the_key_contract():
    plan = tree_plan(20, SDE, splits=(0,), branching=12, trained_fraction=0.6)
    found = [trained_subset(plan, 5, 2, 9, 0, leaf) for leaf in range(12)]
    for leaf, subset in enumerate(found):
        counter = np.array([0, 9, (3 << 56) | (20 << 32), leaf], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(key=np.array([5, 2], dtype=np.uint64), counter=counter))
        assert subset == set(generator.choice(range(19), size=11, replace=False).tolist())
    assert len(set(found)) > 1
    assert found != [trained_subset(plan, 5, 3, 9, 0, leaf) for leaf in range(12)]
    assert set().union(*found) == set(range(19))


@clause("PLAN-7")
def test_a_fraction_needs_chains_that_share_no_trainable_edge():
    with pytest.raises(PlanError, match=r"trained_fraction = 0.5: must be 1 where chains share"):
        small_plan((0, 1), trained_fraction=0.5)
    with pytest.raises(PlanError, match="trained_fraction"):
        small_plan((1,), trained_fraction=0.5)
    assert small_plan((1,), trained_fraction=0.5, trained_steps=(1, 2, 3)).trained_fraction == 0.5
    for fraction in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(PlanError, match="trained_fraction"):
            small_plan((0,), trained_fraction=fraction)
    whole = small_plan((0,))
    assert trained_subset(whole, 0, 0, 0, 0, 1) == frozenset(whole.trainable_steps)


@clause("PLAN-8")
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_method_whose_cost_can_be_counted(name):
    method = preset(name)
    assert isinstance(method, Method)
    assert method.name == name
    assert method.source
    counts = count(method, 100)
    assert 0 < counts.trained_edges <= counts.kept_edges


@clause("PLAN-8", "ERR-5")
def test_an_unknown_preset_offers_near_names():
    with pytest.raises(OptionError, match=r"preset = 'branchgrp': must be a known name, such as branchgrpo"):
        preset("branchgrp")


@clause("PLAN-8", "ERR-5", "ERR-2")
def test_options_without_effect_are_refused():
    flat, family = preset("flowgrpo"), preset("g2rpo")
    for method, rule in [(flat, ParentTop1()), (flat, ExtremeB(1)), (family, DepthWindow(1, 1, 1))]:
        with pytest.raises(OptionError, match=r"pruning\[0\]"):
            replace(method, pruning=(rule,))
    with pytest.raises(OptionError, match=r"depth_window.start = 21"):
        replace(preset("branchgrpo"), pruning=(DepthWindow(21),))


@clause("PLAN-9")
@pytest.mark.parametrize("beta", [0.0, 7.0])
def test_one_split_at_step_zero_is_flat_grpo(beta):
    plan = tree_plan(4, FLOW, splits=(0,), branching=5)
    (tree,) = rollout(plan, Network(), PROMPT, CONDITION, Sampling(KeyedNoise(1), (2, 3)))
    rewards = score(tree, [Toy()])
    values = fuse(tree, rewards, Fusion(beta=beta))
    advantages = normalize([tree], values, (1.0,), Normalization())
    flat = torch.cat([rewards[leaf] for leaf in tree.root.leaves()])
    z = (flat - flat.mean()) / (flat.std() + 1e-8)
    for depth in range(1, 5):
        level = tree.level(depth)
        assert torch.equal(torch.cat([values[node] for node in level]), flat)
        torch.testing.assert_close(torch.stack([advantages[node] for node in level]), z, rtol=1e-14, atol=1e-14)
    assert float(advantages[tree.root]) == 0.0


@clause("PLAN-9")
def test_flow_grpo_is_roots_without_a_split():
    plan = preset("flowgrpo").plan_at(0)
    assert isinstance(plan, Plan)
    assert (plan.roots, plan.splits, plan.leaves) == (24, (), 1)
    dance = preset("dancegrpo").plan_at(0)
    assert isinstance(dance, Plan)
    assert (dance.roots, dance.splits, dance.branching[0], dance.spreads[0]) == (1, (0,), 12, math.inf)


@clause("SCHED-1", "ERR-2", "ERR-1")
@pytest.mark.parametrize(
    ("sigmas", "field"),
    [
        ((1.0, 0.5, 0.1), r"sigmas\[2\]"),
        ((0.9, 0.0), r"sigmas\[0\]"),
        ((1.0, 0.5, 0.5, 0.0), r"sigmas\[2\]"),
        ((1.0, 0.4, 0.6, 0.0), r"sigmas\[2\]"),
        ((1.0, math.nan, 0.0), r"sigmas\[1\]"),
        ((1.0,), "sigmas"),
    ],
)
def test_a_schedule_decreases_strictly_from_one_to_zero(sigmas, field):
    steps = max(len(sigmas) - 1, 0)
    with pytest.raises(PlanError, match=field):
        Plan(sigmas, (SDE,) * steps, (1,) * steps, (1.0,) * steps)


@clause("SCHED-1", "SCHED-2")
@pytest.mark.parametrize("example", ["shifted", "plain"])
def test_the_example_schedules(example):
    e = SCHEDULE[example]
    sigmas = shifted_schedule(e["steps"], e["shift"])
    assert sigmas == pytest.approx(e["sigmas"], rel=1e-15)
    assert (sigmas[0], sigmas[-1]) == (1.0, 0.0)
    assert [a - b for a, b in pairwise(sigmas)] == pytest.approx(e["deltas"], rel=1e-14)


@clause("SCHED-2")
def test_the_shift_is_applied_once_and_keeps_both_ends():
    assert shift_sigma(0.5, 3.0) == 0.75
    assert [shift_sigma(s, 3.0) for s in (0.0, 1.0)] == [0.0, 1.0]
    assert shifted_schedule(20)[1] == pytest.approx(3 * 0.95 / 2.9, rel=1e-15)
    for shift in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(PlanError, match="shift"):
            shifted_schedule(4, shift)
    with pytest.raises(PlanError, match="steps"):
        shifted_schedule(0)
