"""Plans that coincide: flat GRPO as a tree, and siblings that cannot differ."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchgrpo.conformance.clauses import clause
from branchgrpo.properties import strategies
from branchgrpo.properties.checks import degenerations as checks
from branchgrpo.properties.subject import synthetic_trace
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.types import Kernel, KernelKind

pytestmark = pytest.mark.quick

SDE = Kernel(KernelKind.SDE, 0.3)


@clause("PLAN-9")
@given(data=st.data(), steps=st.integers(2, 5), group=st.integers(2, 6), fusion=strategies.fusions)
def test_one_split_at_step_0_is_flat_grpo(subject, judge, data, steps, group, fusion):
    plan = tree_plan(steps, SDE, splits=(0,), branching=group, spread=math.inf)
    prompts = data.draw(strategies.prompt_lists())
    trace = synthetic_trace(plan, prompts, data.draw(strategies.log_probs(plan, len(prompts))))
    judge(checks.flat_findings(subject, trace, data.draw(strategies.rewards(plan, len(prompts))), fusion))


@clause("NOISE-2")
@given(split=st.integers(0, 2), factor=st.integers(2, 4), seed=strategies.seeds, prompts=strategies.prompt_lists())
def test_spread_0_makes_siblings_equal(subject, judge, split, factor, seed, prompts):
    plan = tree_plan(4, SDE, splits=(split,), branching=factor, spread=0.0)
    judge(checks.unspread_findings(subject, plan, KeyedNoise(seed), prompts))
