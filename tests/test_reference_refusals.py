"""Plans that a first reader of the specification found to slip through: refused now, or counted as trained."""

import pytest

from branchgrpo.conformance.clauses import clause
from branchgrpo.reference.counts import count_plan
from branchgrpo.reference.errors import PlanError
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.options import DepthWindow, ParentTop1
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.subsets import trained_subset
from branchgrpo.reference.types import ODE, Kernel, KernelKind, LeafOutput
from branchgrpo.reference.windows import WindowedPlan, WindowSchedule

SDE = Kernel(KernelKind.SDE, 0.3)


@clause("WIN-1")
def test_a_window_over_deterministic_steps_is_refused():
    base = Plan((1.0, 0.9, 0.8, 0.6, 0.4, 0.2, 0.0), (ODE, ODE, ODE, SDE, SDE, ODE), (1,) * 6, (0.0,) * 6)
    moving = WindowedPlan(base, WindowSchedule(2, last=4, period=1))
    with pytest.raises(PlanError, match=r"window = \(0, 1\): must be with a stochastic step of the base plan"):
        moving.at(0)
    assert moving.at(3).stochastic_steps == (3, 4)


@clause("WIN-1", "WIN-4")
def test_a_window_that_has_stopped_is_refused_without_splits():
    base = tree_plan(5, SDE)
    moving = WindowedPlan(base, WindowSchedule(2, last=3, period=1, end="stop"), group=3)
    assert moving.at(2).splits == (2,)
    with pytest.raises(PlanError, match="with a stochastic step of the base plan at iteration 3"):
        moving.at(3)


@clause("PLAN-5", "PLAN-7")
def test_trained_edges_of_a_fraction_are_the_kept_ones():
    plan = tree_plan(10, SDE, splits=(0,), branching=4, trained_fraction=0.6)
    counts = count_plan(plan, (DepthWindow(1, size=8, period=30),))
    chains = [trained_subset(plan, 0, 0, 0, 0, leaf) for leaf in range(4)]
    assert counts.kept_edges == 8
    assert counts.trained_edges == sum(8 in steps for steps in chains) < 4 * 5
    with pytest.raises(PlanError, match="no width rule for a plan without a split, or with a trained fraction below 1"):
        count_plan(plan, (ParentTop1(),))


@clause("PLAN-5", "PRUNE-3")
def test_width_rules_of_a_plan_without_a_split_are_not_counted():
    with pytest.raises(PlanError, match="no width rule for a plan without a split"):
        count_plan(tree_plan(5, SDE), (ParentTop1(),))


@clause("PLAN-7")
def test_a_fraction_of_nothing_is_refused():
    with pytest.raises(PlanError, match=r"trained_fraction = 0\.5: must be 1 where no step is trainable"):
        tree_plan(1, SDE, trained_fraction=0.5)
    assert tree_plan(1, SDE, output=LeafOutput.SAMPLE, trained_fraction=0.5).trainable_steps == (0,)
