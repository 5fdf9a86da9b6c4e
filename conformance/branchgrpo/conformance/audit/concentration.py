"""Stage: how many leaves the path weights really use, against the dimension."""

import torch

from branchgrpo.conformance.audit.context import Context, Data, missing, reason
from branchgrpo.conformance.audit.noise import grow
from branchgrpo.oracle.chain import affine_chain
from branchgrpo.oracle.concentration import tree_effective_sample_size
from branchgrpo.oracle.gaussian import GaussianData
from branchgrpo.reference.implementation import Trace
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.options import Fusion
from branchgrpo.reference.types import Kernel, KernelKind, Reduction

DIMENSIONS = (1, 4, 16, 64, 256, 1024)
FAR = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16_384, 65_536)
PROMPTS, TREES, SEED = 96, 3000, 0
FEW = 2.0
"""Below two leaves in effect, a tree's fusion is the choice of one."""


def weights_of(context: Context, trace: Trace, beta: float) -> torch.Tensor:
    """Weights of the leaves in the root's value, read off by a reward model a leaf that is 1 there and 0 elsewhere."""
    prompts, leaves = trace.states[-1].shape[:2]
    each = torch.eye(leaves, dtype=torch.float64, device=trace.states[-1].device).expand(prompts, -1, -1)
    return context.subject.implementation.fuse(trace, each.contiguous(), Fusion(beta=beta))[0][:, 0].double()


def effective_sample_size(context: Context) -> Data:
    """1/Σw² of the root's leaves: the implementation's weights, and the oracle's for its plan up to large D."""
    if not context.has("rollout", "fuse"):
        return missing("rollout", "fuse")
    beta = context.setting.method.fusion.beta or 1.0
    plan = tree_plan(8, Kernel(KernelKind.SDE, 0.3), splits=(0, 2, 4), branching=2, spread=4.0)
    chain = affine_chain(plan, GaussianData(0.7, 0.5))
    curves: dict[str, Data] = {}
    for reduction in Reduction:
        measured, error = [], []
        for elements in DIMENSIONS:
            weights = weights_of(context, grow(context, plan, PROMPTS, elements, reduction=reduction), beta)
            sizes = 1 / weights.square().sum(dim=1)
            measured.append(float(sizes.mean()))
            error.append(float(sizes.std() / PROMPTS**0.5))
        exact = [tree_effective_sample_size(plan, chain, d, beta, reduction, TREES, SEED)[0] for d in FAR]
        own = {"D": DIMENSIONS, "measured": measured, "error": error}
        curves[reduction.value] = own | {"exact_D": FAR, "exact": exact}
    return {"beta": beta, "leaves": plan.leaves, "curves": curves, **of_the_run(context)}


def of_the_run(context: Context) -> Data:
    """The effective number of leaves of the run's own plan at its own D, and what to say about it."""
    setting, plan = context.setting, context.setting.plan()
    fusion, reduction, elements = setting.method.fusion, setting.method.log_prob, setting.config.elements
    if fusion.kind != "path_softmax" or fusion.beta == 0.0 or not plan.splits:
        return {"run": None, "reasons": []}
    chain = affine_chain(plan, GaussianData(0.7, 0.5))
    size = tree_effective_sample_size(plan, chain, elements, fusion.beta, reduction, TREES, SEED)[0]
    run = {"D": elements, "beta": fusion.beta, "reduction": reduction.value, "leaves": plan.leaves, "size": size}
    said = (
        f"path weights (β = {fusion.beta:g}, {reduction.value}, D = {elements:,}): {size:.3g} of {plan.leaves} leaves"
    )
    few = size < min(FEW, 0.5 * plan.leaves)
    advice = ", in effect one: use β = 0, the standardised softmax, or the mean reduction" if few else " in effect"
    return {"run": run, "reasons": [reason("condition" if few else "note", said + advice, "FUSE-7")]}
