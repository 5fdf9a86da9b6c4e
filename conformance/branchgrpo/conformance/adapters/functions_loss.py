"""An objective from a wrapped step and a wrapped loss: which edges, in which order, is all that is added."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.conformance.adapters.partial import checked_velocity, require
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.implementation import Levels, Masks, Trace
from branchgrpo.reference.options import Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, VelocityModel

Loss = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""``loss(new, old, advantages, clip)``: new and old log-probabilities and advantages of all edges of a tree."""

Score = Callable[[Plan, int, Tensor, Tensor, Tensor], Tensor]
"""``score(plan, step, x, velocity, child) → [edges]`` log-probabilities."""


def tree_columns(trace: Trace, root: int, depth: int) -> slice:
    """Columns of one root's nodes in a level (TRACE-2)."""
    size = trace.plan.level_sizes[depth]
    return slice(root * size, (root + 1) * size)


def tree_edges(
    trace: Trace,
    model: VelocityModel,
    condition: Condition,
    advantages: Levels,
    kept: Masks,
    score: Score,
    at: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """New log-probabilities, old ones and advantages of one tree's trained edges."""
    prompt, root = at
    plan, new, old, weight = trace.plan, [], [], []
    for step in plan.trainable_steps:
        columns = tree_columns(trace, root, step + 1)
        stays = kept[step][prompt, columns]
        level = trace.log_probs[step]
        if not bool(stays.any()) or level is None:
            continue
        parents = trace.states[step][prompt, tree_columns(trace, root, step)].repeat_interleave(
            plan.branching[step], dim=0
        )
        dtype = trace.means[step].dtype
        x, child = parents[stays].to(dtype), trace.states[step + 1][prompt, columns][stays].to(dtype)
        sigma = torch.full((len(x),), plan.sigmas[step], dtype=dtype, device=x.device)
        v = checked_velocity(model, x, sigma, condition.gather(torch.full((len(x),), prompt)))
        new.append(score(plan, step, x, v, child))
        old.append(level[prompt, columns][stays])
        weight.append(advantages[step + 1][prompt, columns][stays])
    if not new:
        raise InputError("kept", "no trainable edge", "masks that leave something to train")
    return torch.cat(new), torch.cat(old), torch.cat(weight)


def step_objective(
    traces: Sequence[Trace],
    model: VelocityModel,
    condition: Condition,
    advantages: Sequence[Levels],
    kept: Sequence[Masks],
    options: Objective,
    score: Score,
    loss: Loss,
) -> Float64[Tensor, ""]:
    """−loss, the mean over all trees of all traces."""
    require(options.clip_low == options.clip_high, "one clip range for both sides")
    if len(condition) != len(traces[0].prompts):
        raise InputError("len(condition)", len(condition), f"{len(traces[0].prompts)}, one a prompt")
    values = []
    for trace, levels, masks in zip(traces, advantages, kept, strict=True):
        for prompt in range(len(trace.prompts)):
            for root in range(trace.plan.roots):
                edges = tree_edges(trace, model, condition, levels, masks, score, (prompt, root))
                values.append(-loss(*edges, options.clip_low).double())
    return torch.stack(values).mean()
