"""The cases that every implementation is driven through: small, but each with the power that its checks ask for."""

import math
from dataclasses import replace

import torch

from branchgrpo.conformance.case import Case
from branchgrpo.conformance.subjects import Constant, Distance, Slope
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import Method, tree_plan
from branchgrpo.reference.options import (
    DepthWindow,
    ExtremeB,
    Fusion,
    Normalization,
    Objective,
    ParentTop1,
    PruningRule,
)
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput, Reduction
from branchgrpo.reference.windows import WindowedPlan, WindowSchedule

SDE, FLOW, CPS = Kernel(KernelKind.SDE, 0.3), Kernel(KernelKind.FLOW_SDE, 0.7), Kernel(KernelKind.CPS, 0.6)
SOURCE = "conformance"
WIDE = Objective(clip_low=1e-2, clip_high=1e-2)
ONE, TWO = (Distance(0.3),), (Distance(0.3), Slope())


def tree(kernel: Kernel = SDE, *, spread: float = 1.0, branching: int = 2, steps: int = 5, **options: object) -> Plan:
    """A small tree with two splits and single-child steps between and after them."""
    return tree_plan(steps, kernel, splits=(0, 2), branching=branching, spread=spread, **options)  # type: ignore[arg-type]


def method(name: str, sampler: Plan | WindowedPlan | PlanFamily, **options: object) -> Method:
    """A method with a wide clip, so that the arithmetic of float32 stays far below it."""
    return Method(name, SOURCE, sampler, **{"objective": WIDE, **options})  # type: ignore[arg-type]


def pruned(name: str, rules: tuple[PruningRule, ...], iteration: int = 0, rewards: int = 1) -> Case:
    """A tree of eight leaves under pruning rules."""
    plan = tree(branching=2, steps=6, sde_steps=None)
    deep = replace(plan, branching=(2, 1, 2, 2, 1, 1))
    models, weights = (ONE, (1.0,)) if rewards == 1 else (TWO, (1.0, -0.5))
    return Case(method(name, deep, pruning=rules), models, weights, iteration=iteration)


def statistics_cases(dtype: torch.dtype = torch.float64) -> dict[str, Case]:
    """Rollouts wide enough for the laws of the noise: siblings at s = 1 and s = 4, every kernel, several roots."""
    big = {"prompts": 6, "latent": (24, 40), "training": False, "dtype": dtype, "storage": dtype}
    return {
        "noise-sde": Case(method("noise-sde", tree(SDE, branching=3)), ONE, **big),  # type: ignore[arg-type]
        "noise-flow": Case(method("noise-flow", tree(FLOW, branching=2)), ONE, **big),  # type: ignore[arg-type]
        "noise-cps": Case(method("noise-cps", tree(CPS, branching=2)), ONE, **big),  # type: ignore[arg-type]
        "noise-roots": Case(method("noise-roots", tree(SDE, roots=2)), ONE, **big),  # type: ignore[arg-type]
        "noise-flat": Case(method("noise-flat", tree_plan(4, SDE, splits=(0,), branching=4)), ONE, **big),  # type: ignore[arg-type]
        "noise-wide": Case(method("noise-wide", tree(SDE, spread=math.inf)), ONE, **big),  # type: ignore[arg-type]
    }


def plan_cases() -> dict[str, Case]:
    """Trees with training: outputs, reductions, fusions, scopes, several rewards, fractions, storage dtypes."""
    bessel = Normalization()
    tight = Normalization(clip=0.8)
    sample = tree(SDE, output=LeafOutput.SAMPLE, trained_steps=(0, 1, 2, 3))
    roots = Normalization(mean_scope="prompt", std_scope="batch", bessel=False, eps=1e-4)
    pooled = Normalization(mean_scope="prompt", std_scope="prompt")
    grouped = Normalization(mean_scope="prompt", std_scope="prompt")
    summed = Normalization(order="sum_then_normalize")
    low = torch.bfloat16
    flat = tree_plan(6, SDE, splits=(0,), branching=8, trained_fraction=0.5)
    return {
        "tree": Case(method("tree", tree(), fusion=Fusion(beta=1.0), normalization=bessel), ONE),
        "sum": Case(method("sum", tree(), log_prob=Reduction.SUM, fusion=Fusion(beta=0.02)), ONE),
        "sample": Case(method("sample", sample), ONE),
        "child-softmax": Case(method("child-softmax", tree(FLOW), fusion=Fusion("child_softmax", 20.0)), ONE),
        "standardised": Case(method("standardised", tree(CPS), fusion=Fusion("standardised", 0.7)), ONE),
        "uniform": Case(method("uniform", tree(branching=3), fusion=Fusion(beta=0.0)), ONE),
        "two-rewards": Case(method("two-rewards", tree(), normalization=tight), TWO, (1.0, 0.7)),
        "sum-rewards": Case(method("sum-rewards", tree(), normalization=summed), TWO, (1.0, -0.5)),
        "roots": Case(method("roots", tree_plan(4, FLOW, roots=4), normalization=roots), ONE, prompts=3),
        "pooled": Case(method("pooled", tree(roots=2), normalization=pooled), ONE),
        "equal": Case(method("equal", tree()), (Constant(),)),
        "depth-mean": Case(method("depth-mean", tree(), objective=replace(WIDE, reduction="depth_mean")), ONE),
        "weighted": Case(method("weighted", tree(FLOW), objective=replace(WIDE, edge_weights="std")), ONE),
        "flat": Case(method("flat", tree_plan(5, SDE, splits=(0,), branching=6), fusion=Fusion(beta=0.0)), ONE),
        "flat-roots": Case(method("flat-roots", tree_plan(5, SDE, roots=6), normalization=grouped), ONE),
        "flat-bf16": Case(
            method("flat-bf16", tree_plan(5, SDE, splits=(0,), branching=4), fusion=Fusion(beta=0.0)),
            ONE,
            dtype=torch.float32,
            storage=low,
            latent=(16, 16),
        ),
        "fraction": Case(method("fraction", flat), ONE),
        "bf16": Case(method("bf16", tree()), ONE, dtype=torch.float32, storage=low, latent=(16, 16)),
    }


def pruning_cases() -> dict[str, Case]:
    """Every rule, alone and together, at iterations before, when and after windows move, the last one before too."""
    down, up = DepthWindow(3, 2, 30, 1), DepthWindow(5, 2, 30, -1, 2)
    cases = {
        "parent-top1": pruned("parent-top1", (ParentTop1(),)),
        "parent-top1-splits": pruned("parent-top1-splits", (ParentTop1(drop_split_edges=True),)),
        "parent-top1-rewards": pruned("parent-top1-rewards", (ParentTop1(),), rewards=2),
        "extreme-b": pruned("extreme-b", (ExtremeB(2),)),
        "extreme-b-splits": pruned("extreme-b-splits", (ExtremeB(1, drop_split_edges=True),)),
        "both": pruned("both", (ParentTop1(), DepthWindow(6, 1))),
    }
    for iteration in (0, 29, 30, 60, 500):
        cases[f"depth-down-{iteration}"] = pruned(f"depth-down-{iteration}", (down,), iteration)
        cases[f"depth-up-{iteration}"] = pruned(f"depth-up-{iteration}", (up,), iteration)
    return cases


def window_cases() -> dict[str, Case]:
    """BranchGRPO-Mix and MixGRPO over the iterations, with every order, decay and end."""
    base = tree_plan(8, FLOW)
    mixed = tree_plan(8, SDE, splits=(0, 3), branching=2, spread=2.0)
    schedules = {
        "mix": WindowedPlan(mixed, WindowSchedule(2, last=6, stride=2, period=5)),
        "group": WindowedPlan(base, WindowSchedule(3, last=6, stride=3, period=5, end="wrap"), 3),
        "linear": WindowedPlan(base, WindowSchedule(2, last=6, period=8, decay="linear"), 3),
        "exponential": WindowedPlan(
            base, WindowSchedule(2, last=6, period=8, decay="exponential", rate=0.5, threshold=2), 3
        ),
        "random": WindowedPlan(base, WindowSchedule(2, last=6, period=3, order="random"), 3),
    }
    return {
        f"window-{name}-{iteration}": Case(
            method(f"window-{name}-{iteration}", sampler), ONE, iteration=iteration, training=False
        )
        for name, sampler in schedules.items()
        for iteration in (0, 4, 5, 9, 14, 23, 100)
    }


def family_cases() -> dict[str, Case]:
    """Plan families: three granularities, both stride anchors, pooled roots, the last step under ``sample``.

    Each has an iteration of its own: members are told apart by it in a trace.
    """
    tight, pooled = Normalization(clip=1.2), Normalization(mean_scope="prompt", std_scope="prompt")
    three = PlanFamily(shifted_schedule(8), FLOW, (0, 1, 3), 3, (1, 2, 3))
    end = PlanFamily(shifted_schedule(8), FLOW, (0, 2), 3, (1, 3), "end")
    several = PlanFamily(shifted_schedule(4), FLOW, (0, 3), 2, roots=2, output=LeafOutput.SAMPLE)
    return {
        "family": Case(method("family", three), ONE),
        "family-clipped": Case(method("family-clipped", three, normalization=tight), TWO, (1.0, 0.8), iteration=1),
        "family-end": Case(method("family-end", end), ONE, iteration=2),
        "family-roots": Case(method("family-roots", several, normalization=pooled), ONE, iteration=3),
    }


def all_cases() -> dict[str, Case]:
    """Every case by its name."""
    return statistics_cases() | plan_cases() | pruning_cases() | window_cases() | family_cases()
