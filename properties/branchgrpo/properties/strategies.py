"""Hypothesis strategies for plans and everything around them; they shrink towards small plans that read at a glance.

A plan shrinks to few steps, levels 1, 1 − 1/T, …, the constant-g kernel, no splits; rewards shrink to small integers.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from hypothesis import strategies as st
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.family import PlanFamily
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
from branchgrpo.reference.protocols import Prompt
from branchgrpo.reference.schedule import shift_sigma
from branchgrpo.reference.types import ODE, Kernel, KernelKind, LeafOutput

MAX_STEPS = 5
MAX_LEAVES = 8

spreads = st.sampled_from([math.inf, 4.0, 1.0, 0.0, 0.25, 1e9])
"""Branch spreads: both ends of the range, the published one, and extremes."""

outputs = st.sampled_from([LeafOutput.SAMPLE, LeafOutput.DENOISED])


def stochastic_kernels() -> st.SearchStrategy[Kernel]:
    """Kernels that draw noise; the simplest is the constant-g SDE of the papers."""
    return st.one_of(
        st.builds(Kernel, st.just(KernelKind.SDE), st.sampled_from([0.3, 1.0, 0.05])),
        st.builds(Kernel, st.just(KernelKind.FLOW_SDE), st.sampled_from([0.7, 0.2])),
        st.builds(Kernel, st.just(KernelKind.CPS), st.sampled_from([0.7, 1.0, 0.1])),
    )


@st.composite
def schedules(draw: st.DrawFn, steps: int) -> tuple[float, ...]:
    """T + 1 levels from 1 to 0: evenly spaced, shifted, or uneven (by integer step lengths)."""
    shift = draw(st.sampled_from([1.0, 3.0]))
    lengths = draw(st.lists(st.integers(1, 4), min_size=steps, max_size=steps))
    left = [sum(lengths[i:]) / sum(lengths) for i in range(steps)]
    return (*(shift_sigma(level, shift) for level in left), 0.0)


@st.composite
def plans(
    draw: st.DrawFn,
    *,
    min_splits: int = 0,
    max_steps: int = MAX_STEPS,
    max_leaves: int = MAX_LEAVES,
    max_roots: int = 2,
    every_step_stochastic: bool = False,
) -> Plan:
    """Valid plans: any T, any splits, K a step, all kernels, both leaf outputs.

    Args:
        draw: Hypothesis' draw.
        min_splits: splits that the plan has at least.
        max_steps: largest T.
        max_leaves: largest number of leaves of one root.
        max_roots: largest R.
        every_step_stochastic: no ODE step but the last one under ``denoised``.
    """
    steps = draw(st.integers(max(2, min_splits + 1), max_steps))
    output = draw(outputs)
    sigmas = draw(schedules(steps))
    last = steps - 1 if output is LeafOutput.DENOISED else steps
    noisy = stochastic_kernels()
    kernels = [draw(noisy if every_step_stochastic or i == 0 else st.one_of(noisy, st.just(ODE))) for i in range(steps)]
    able = [i for i in range(last) if kernels[i].is_stochastic(sigmas[i + 1])]
    wanted = min(min_splits, len(able))
    splits = draw(st.lists(st.sampled_from(able), min_size=wanted, max_size=len(able), unique=True))
    branching, leaves = [1] * steps, 1
    for step in sorted(splits):
        factors = [k for k in (2, 3, 4) if leaves * k <= max_leaves]
        branching[step] = draw(st.sampled_from(factors)) if factors else 1
        leaves *= branching[step]
    return Plan(
        sigmas=sigmas,
        kernels=tuple(kernels),
        branching=tuple(branching),
        spreads=tuple(draw(spreads) if k > 1 else math.inf for k in branching),
        roots=draw(st.integers(1, max_roots)),
        output=output,
    )


def reward_values() -> st.SearchStrategy[float]:
    """One reward: small integers (so that ties are common), ordinary reals, huge and near-equal ones."""
    return st.one_of(
        st.integers(-3, 3).map(float),
        st.floats(-10.0, 10.0, allow_nan=False).map(lambda r: round(r, 3)),
        st.sampled_from([1e12, -1e12, 1.0 + 2.0**-20, 1.0 + 2.0**-19, 1e-12, 0.0]),
    )


@st.composite
def rewards(
    draw: st.DrawFn, plan: Plan, prompts: int, max_models: int = 2, ordinary: bool = False
) -> Float64[Tensor, "prompts leaves models"]:
    """Rewards of all leaves of all prompts; ties, extremes and near-equal values included.

    With ``ordinary`` they are integers in −20..20 of which the first two of a tree differ, so that no std is tiny.
    """
    models = draw(st.integers(1, max_models))
    count = prompts * plan.roots * plan.leaves * models
    element = st.integers(-20, 20).map(float) if ordinary else reward_values()
    flat = draw(st.lists(element, min_size=count, max_size=count))
    table = torch.tensor(flat, dtype=torch.float64).reshape(prompts, plan.roots, plan.leaves, models)
    if ordinary and plan.leaves > 1:
        table[:, :, 0] = table[:, :, 1] + 1.0
    return table.reshape(prompts, plan.roots * plan.leaves, models)


@st.composite
def log_probs(draw: st.DrawFn, plan: Plan, prompts: int) -> tuple[Tensor | None, ...]:
    """Log-probabilities of all edges, entry d − 1 for depth d; None at deterministic steps; scales from 10⁻³ to 10⁵."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([1.0, 1e-3, 30.0, 1e5]))
    widths = [prompts, *(plan.roots * n for n in plan.level_sizes)]
    return tuple(
        torch.from_numpy(scale * rng.standard_normal((prompts, widths[i + 2]))) if i in plan.stochastic_steps else None
        for i in range(plan.steps)
    )


def reward_weights(models: int) -> st.SearchStrategy[tuple[float, ...]]:
    """One weight a reward model, negative ones among them."""
    return st.tuples(*[st.sampled_from([1.0, 0.5, 2.0, -1.0])] * models)


fusions = st.builds(
    Fusion, st.sampled_from(["path_softmax", "child_softmax", "standardised"]), st.sampled_from([0.0, 1.0, 0.1, 20.0])
)
"""All estimators, β from 0 to sharp."""

normalizations = st.builds(
    Normalization,
    mean_scope=st.sampled_from(["tree", "prompt"]),
    std_scope=st.sampled_from(["tree", "prompt", "batch"]),
    bessel=st.booleans(),
    eps=st.sampled_from([1e-8, 1e-4]),
    clip=st.sampled_from([5.0, 0.5, math.inf]),
    order=st.sampled_from(["normalize_then_sum", "sum_then_normalize"]),
)
"""All scopes, both stds, both orders, clips that bind and that do not."""

objectives = st.builds(
    Objective,
    clip_low=st.sampled_from([1e-3, 0.2]),
    clip_high=st.sampled_from([1e-3, 0.3]),
    reduction=st.sampled_from(["edge_mean", "depth_mean"]),
    edge_weights=st.sampled_from(["uniform", "std"]),
)
"""Clip ranges, both reductions, both edge weightings; no KL."""


@st.composite
def depth_windows(draw: st.DrawFn, steps: int) -> DepthWindow:
    """Windows that lie in 1..T and move either way."""
    directions: st.SearchStrategy[Literal[1, -1]] = st.sampled_from((1, -1))
    direction = draw(directions)
    start = draw(st.integers(1, steps))
    size = draw(st.integers(1, steps - start + 1 if direction == 1 else steps))
    stop = draw(st.integers(start + size - 1, steps) if direction == 1 else st.integers(1, start))
    return DepthWindow(start, size, draw(st.integers(1, 3)), direction, draw(st.sampled_from([None, stop])))


def pruning_rules(plan: Plan) -> st.SearchStrategy[tuple[PruningRule, ...]]:
    """Up to two rules that fit a plan."""
    rules: list[st.SearchStrategy[PruningRule]] = [depth_windows(plan.steps)]
    if plan.splits:
        rules = [
            st.builds(ParentTop1, st.booleans()),
            st.builds(ExtremeB, st.integers(1, 3), st.booleans()),
            *rules,
        ]
    return st.lists(st.one_of(rules), min_size=1, max_size=2).map(tuple)


granularity_sets = st.sampled_from([(1,), (1, 2), (1, 2, 3), (2, 3), (3, 1)])
"""Λ: the paper's sets, and one whose first granularity is not the finest."""


@st.composite
def families(draw: st.DrawFn, max_steps: int = MAX_STEPS) -> PlanFamily:
    """Plan families: any k that the leaf output allows, Λ, stride anchor, roots."""
    steps = draw(st.integers(2, max_steps))
    output = draw(outputs)
    top = steps - (2 if output is LeafOutput.DENOISED else 1)
    kernel = draw(stochastic_kernels().filter(lambda k: k.kind is not KernelKind.CPS))
    return PlanFamily(
        sigmas=draw(schedules(steps)),
        kernel=kernel,
        ks=tuple(sorted(draw(st.lists(st.integers(0, top), min_size=1, max_size=3, unique=True)))),
        group=draw(st.integers(2, 3)),
        granularities=draw(granularity_sets),
        stride_anchor=draw(st.sampled_from(["start", "end"])),
        roots=draw(st.integers(1, 2)),
        output=output,
    )


@st.composite
def prompt_lists(draw: st.DrawFn, max_size: int = 2) -> tuple[Prompt, ...]:
    """Prompts with distinct ids that are not their positions."""
    ids = draw(st.lists(st.integers(0, 40), min_size=1, max_size=max_size, unique=True))
    return tuple(Prompt(i, f"prompt {i}") for i in ids)


seeds = st.integers(0, 2**32 - 1)
"""Seeds of noise and latents: their values are not worth shrinking, their number is."""


@st.composite
def latents(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Float[Tensor, "*latent"]:
    """States: zeros first, then ones, normal draws, and normal draws a thousand times as large or as small."""
    scale = draw(st.sampled_from([0.0, 1.0, 1e3, 1e-3]))
    if scale == 0.0:
        return torch.full(shape, draw(st.sampled_from([0.0, 1.0])), dtype=dtype)
    rng = np.random.default_rng(draw(seeds))
    return torch.from_numpy(scale * rng.standard_normal(shape)).to(dtype)


def permutations(size: int) -> st.SearchStrategy[Sequence[int]]:
    """Orders of ``size`` things; the identity is the simplest."""
    return st.permutations(range(size))
