"""Gradient norm a depth: a costly monitor, one more backward pass through every trained edge."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from branchgrpo.optimized.pruning import Masks
from branchgrpo.optimized.ranks import Ranks
from branchgrpo.optimized.tree import Tree
from branchgrpo.optimized.update import Parallel, accumulate_gradients, trained_stds
from branchgrpo.training.engine.iteration import Part, PartOutcome
from branchgrpo.training.engine.steps import Group, Updater, groups_of
from branchgrpo.training.monitors.measure import depth_name


class Alone(Ranks):
    """A single process, which gathers from nobody."""

    def everyone(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]


def one_step_masks(tree: Tree, step: int) -> Masks:
    """All edges of one step, and none of the others."""
    shapes = [level.shape[:2] for level in tree.states[1:]]
    return tuple(torch.full(shape, i == step, dtype=torch.bool) for i, shape in enumerate(shapes))


def kept_edges(group: Group, step: int, parts: int) -> list[int]:
    """Kept trainable edges of one step in each part."""
    counts = [0] * parts
    for o in group:
        if step in o.tree.plan.trainable_steps:
            counts[o.part] += int(o.kept[step].sum())
    return counts


@contextmanager
def gradients_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """The parameters have no gradients within, and at the end those that they had."""
    kept = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, kept, strict=True):
            p.grad = grad


def total_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Euclidean norm of all gradients together, in float64; sharded ones over their shards."""
    squares = torch.zeros((), dtype=torch.float64)
    for p in parameters:
        if p.grad is not None:
            part = p.grad.detach().double().square().sum()
            squares += (part.full_tensor() if hasattr(part, "full_tensor") else part).cpu()
    return float(squares.sqrt())


def accumulate_step(updater: Updater, parts: Sequence[Part], group: Group, step: int, counts: Sequence[int]) -> None:
    """Add the gradient of one step's edges, with the coefficients and step weights of the whole update (OBJ-4, OBJ-6).

    Args:
        updater: as in the update itself.
        parts: of this rank.
        group: outcomes of one step of the optimiser.
        step: whose edges count.
        counts: its kept edges in each part, over all ranks; parts without any are left out on every rank.
    """
    ranks = updater.cluster.ranks
    total = updater.cluster.size * sum(len(o.tree.prompts) * o.tree.plan.roots for o in group)
    stds = trained_stds([o.tree for o in group], [o.kept for o in group], ranks)
    active = [i for i, count in enumerate(counts) if count > 0]
    for i in active:
        mine, last = [o for o in group if o.part == i], i == active[-1]
        hold = updater.policies.no_sync if ranks is not None else nullcontext
        owned = [one_step_masks(o.tree, step) for o in mine]
        with nullcontext() if last else hold():
            accumulate_gradients(
                [o.tree for o in mine],
                updater.policies.update,
                parts[i].condition,
                [o.advantages for o in mine],
                [o.kept for o in mine],
                updater.method.objective,
                micro_batch=updater.config.micro_batch or None,
                reference_model=updater.policies.reference,
                total_trees=total,
                all_stds=stds,
                parallel=Parallel(ranks or Alone(0, 1), owned, hold if last else nullcontext),
            )


def gradient_norms_by_depth(
    updater: Updater, parts: Sequence[Part], outcomes: Sequence[PartOutcome]
) -> dict[str, float]:
    """``gradient_norm/depth_DD``: norm of each trained depth's part of the gradient; the parts add up to the whole.

    To be called before the first step of the optimiser, at the policy that sampled; gradients stay as they are. Where
    the optimiser steps once a member of a plan family, a depth's norm is that of its own step. Every rank calls it.

    Args:
        updater: of the run.
        parts: of this rank.
        outcomes: of this rank, all parts.
    """
    weights = list(updater.policies.weights.values())
    found = {}
    with gradients_aside(weights):
        for group in groups_of(outcomes, updater.config.step_per):
            for step in sorted({step for o in group for step in o.tree.plan.trainable_steps}):
                everyone = updater.cluster.everyone(kept_edges(group, step, len(parts)))
                counts = [sum(column) for column in zip(*everyone, strict=True)]
                if any(counts):
                    accumulate_step(updater, parts, group, step, counts)
                    found[f"gradient_norm/{depth_name(step + 1)}"] = total_norm(weights)
                for p in weights:
                    p.grad = None
    return found
