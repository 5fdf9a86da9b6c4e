"""The published arithmetic, counted from the plans (PLAN-4, PLAN-5, PRUNE-3, PRUNE-5, SING-4, GRAN-3)."""

import pytest

from branchgrpo.reference.counts import Counts, count, count_plan, kept_by_depth
from branchgrpo.reference.errors import PlanError
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.options import DepthWindow, ExtremeB, ParentTop1
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.presets import PRESETS, preset
from branchgrpo.reference.types import Kernel, KernelKind
from branchgrpo.reference.windows import WindowedPlan

SDE = Kernel(KernelKind.SDE, 0.3)


def counted(name: str, iteration: int = 0) -> Counts:
    return count(preset(name), iteration)


def test_full_tree_of_the_dense_preset():
    c = counted("branchgrpo")
    assert (c.steps, c.leaves, c.nodes, c.edges, c.denoiser_calls) == (20, 16, 219, 218, 203)
    assert (c.nfe_nodes, c.nfe_calls) == (13.6875, 12.6875)
    assert (c.kept_edges, c.kept_parents, c.trained_edges, c.trained_parents) == (218, 203, 202, 187)


def test_parent_top1():
    c = counted("branchgrpo-widpru")
    assert (c.kept_edges, c.kept_parents, c.trained_edges, c.trained_parents) == (138, 123, 130, 115)
    assert c.kept_edges / c.leaves == 8.625


@pytest.mark.parametrize(
    ("name", "edges", "a_leaf"), [("branchgrpo-deppru", 154, 9.625), ("branchgrpo-deppru-5", 138, 8.625)]
)
def test_depth_window(name, edges, a_leaf):
    c = counted(name)
    assert (c.kept_edges, c.kept_edges / c.leaves) == (edges, a_leaf)
    assert counted(name, 29) == c


@pytest.mark.parametrize(
    ("name", "public", "shared", "stopped"),
    [("g2rpo-single", 1216, 1120, 1112), ("g2rpo-12", 1792, 1552, 1544), ("g2rpo", 2188, 1828, 1820)],
)
def test_granular_calls(name, public, shared, stopped):
    c = counted(name)
    assert (c.calls_public, c.calls_shared, c.calls_shared_stopped_anchor) == (public, shared, stopped)
    assert (c.denoiser_calls, c.trained_edges, c.trained_parents) == (stopped, 96, 8)


def test_mix_trains_its_window_and_splits_only():
    assert counted("branchgrpo-mix").trained_edges == 34
    sampler = preset("branchgrpo-mix").sampler
    assert isinstance(sampler, WindowedPlan)
    assert sampler.window.starts == tuple(range(16))


def test_dancegrpo_trains_eleven_of_twenty_steps():
    c = counted("dancegrpo-tf06")
    assert c.trained_edges == 11 * c.leaves


@pytest.mark.parametrize("factor", [3, 4])
def test_leaves_of_wider_trees(factor):
    assert counted(f"branchgrpo-k{factor}").leaves == factor**4


def brute_force(plan: Plan, rules, iteration: int) -> tuple[int, int]:
    """Kept edges and parents by growing the index tree and pruning it with rewards = leaf index."""
    import torch

    from branchgrpo.reference.protocols import Prompt
    from branchgrpo.reference.pruning import prune
    from branchgrpo.reference.tree import Node, Tree

    def grow(node: Node) -> None:
        if node.depth < plan.steps:
            for b in range(plan.branching[node.depth]):
                child = Node(node.depth + 1, node.index * plan.branching[node.depth] + b, node.state, node)
                node.children.append(child)
                grow(child)

    root = Node(0, 0, torch.zeros(1))
    grow(root)
    tree = Tree(plan, Prompt(0, ""), 0, root)
    kept = prune([tree], {leaf: float(leaf.index) for leaf in root.leaves()}, rules, iteration)
    return len(kept), len({edge.parent for edge in kept})


@pytest.mark.parametrize(
    "rules",
    [
        (),
        (ParentTop1(),),
        (ParentTop1(drop_split_edges=True),),
        (ExtremeB(1),),
        (ExtremeB(5),),
        (DepthWindow(2, size=2, period=1),),
        (ParentTop1(), DepthWindow(5, size=3, period=1, direction=-1, stop=2)),
    ],
)
@pytest.mark.parametrize("splits", [(0, 1), (1, 3), (0, 4), (2,)])
@pytest.mark.parametrize("iteration", [0, 2])
def test_counts_agree_with_pruning_a_real_tree(rules, splits, iteration):
    plan = tree_plan(6, SDE, splits=splits, branching=3, spread=4.0)
    kept = kept_by_depth(plan, rules, iteration)
    assert (sum(e for e, _ in kept), sum(p for _, p in kept)) == brute_force(plan, rules, iteration)


def test_a_count_that_rewards_would_change_is_refused():
    plan = tree_plan(6, SDE, splits=(0, 1), branching=3, spread=4.0)
    with pytest.raises(PlanError, match="at most one width rule"):
        count_plan(plan, (ParentTop1(), ExtremeB(1)))
    with pytest.raises(PlanError, match="without drop_split_edges"):
        count_plan(plan, (ExtremeB(1, drop_split_edges=True),))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_builds_and_counts(name):
    method = preset(name)
    assert method.name == name
    c = count(method)
    assert 0 < c.trained_edges <= c.kept_edges <= c.edges < c.nodes
    assert c.trained_parents <= c.kept_parents <= c.denoiser_calls
