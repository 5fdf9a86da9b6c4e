"""Leaves of full-size rollouts: marginals equal the flat rollout's for every kernel and plan, joint laws as stated."""

import pytest

from branchgrpo.conformance.clauses import clause
from branchgrpo.properties.checks.leaves import FULL_ELEMENTS, leaf_findings
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput

pytestmark = pytest.mark.quick

KERNELS = {
    "constant g": Kernel(KernelKind.SDE, 0.3),
    "flow g": Kernel(KernelKind.FLOW_SDE, 0.7),
    "CPS": Kernel(KernelKind.CPS, 0.7),
}


def plans():
    """A flat chain and a tree of every kernel; windows of SDE steps in an ODE; both leaf outputs."""
    for name, kernel in KERNELS.items():
        yield f"{name}, flat", tree_plan(8, kernel)
        yield f"{name}, tree", tree_plan(8, kernel, splits=(0, 3), branching=2, spread=4.0)
    sde = KERNELS["constant g"]
    yield "ODE", tree_plan(8, sde, sde_steps=())
    yield "mixed, tree", tree_plan(8, sde, splits=(1, 4), branching=2, spread=1.0, sde_steps=(2,))
    yield "sample, tree", tree_plan(8, sde, splits=(0, 7), branching=2, spread=2.0, output=LeafOutput.SAMPLE)


PLANS = dict(plans())


@clause("NOISE-1", "NOISE-2", "KERN-2", "KERN-3", "KERN-4", "KERN-5", "PLAN-6", "ORACLE-4", "ORACLE-7")
@pytest.mark.parametrize("name", list(PLANS))
def test_leaves_have_their_exact_law(sampler, seed, scale, judge, name):
    size = max(400, int(FULL_ELEMENTS * scale))
    whole = name == "constant g, tree"
    judge(leaf_findings(sampler, PLANS[name], KeyedNoise(seed + 1), name, size, whole_law=whole))
