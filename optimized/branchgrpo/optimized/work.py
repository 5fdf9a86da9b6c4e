"""The work of an update: unique parents of kept trainable edges, with the edges' coefficients (spec: objective)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from branchgrpo.optimized.pruning import Masks
from branchgrpo.optimized.tree import Tree
from branchgrpo.reference.errors import InputError, PlanError
from branchgrpo.reference.options import Objective
from branchgrpo.reference.plan import Plan


@dataclass(frozen=True, eq=False)
class Work:
    """Some parents of one step of one tree, and all their kept edges.

    Attributes:
        tree: index into the update's trees.
        step: i; the parents have depth i.
        parents: flat indices into level i, ascending.
        edges: flat indices into level i + 1.
        owner: for every edge the position of its parent in ``parents``.
        coefficient: of every edge's term in J.
    """

    tree: int
    step: int
    parents: Int64[Tensor, "parents"]
    edges: Int64[Tensor, "edges"]
    owner: Int64[Tensor, "edges"]
    coefficient: Float64[Tensor, "edges"]

    def part(self, first: int, last: int) -> "Work":
        """The parents first … last − 1 and their edges."""
        low, high = torch.searchsorted(self.owner, torch.tensor([first, last])).tolist()
        at = slice(low, high)
        return Work(
            self.tree, self.step, self.parents[first:last], self.edges[at], self.owner[at] - first, self.coefficient[at]
        )


def trainable_masks(plan: Plan, kept: Masks) -> dict[int, Bool[Tensor, "prompts _"]]:
    """For every trainable step its kept edges.  Clause: OBJ-3, PLAN-6.

    Raises:
        InputError: masks that do not match the plan.
    """
    found = tuple(mask.shape[1] for mask in kept)
    expected = tuple(plan.roots * n for n in plan.level_sizes[1:])
    if found != expected:
        raise InputError("kept: nodes", found, f"{expected}, one entry a child depth")
    return {step: kept[step].cpu() for step in plan.trainable_steps}


def edge_coefficients(
    plan: Plan, masks: Mapping[int, Bool[Tensor, "prompts _"]], trees: int, reduction: str
) -> dict[int, Float64[Tensor, "prompts _"]]:
    """Coefficient of every kept edge's term in J: 1/(trees·|E|), or 1/(trees·depths·|E_d|) in the edge's own tree.

    Clause: OBJ-3, OBJ-4, ERR-2.

    Args:
        plan: of the trees.
        masks: kept edges of every trainable step.
        trees: number of trees that J averages over.
        reduction: ``edge_mean`` or ``depth_mean``.

    Raises:
        PlanError: a tree with nothing left to train.
    """
    grouped = {step: torch.unflatten(mask, 1, (plan.roots, -1)) for step, mask in masks.items()}
    counts = {step: mask.sum(dim=-1, keepdim=True).double() for step, mask in grouped.items()}
    total = sum(counts.values(), start=torch.zeros(1, dtype=torch.float64))
    if bool((total == 0).any()):
        raise PlanError("trained edges", 0, "at least one a tree after pruning")
    depths = sum(((n > 0).double() for n in counts.values()), start=torch.zeros(1, dtype=torch.float64))
    result = {}
    for step, mask in grouped.items():
        normaliser = total if reduction == "edge_mean" else depths * counts[step].clamp(min=1.0)
        result[step] = (mask / (trees * normaliser)).flatten(1)
    return result


def step_weights(stds: Mapping[int, float], weighting: str) -> dict[int, float]:
    """W of every trained step: 1, or proportional to its std with mean 1 over the distinct trained steps.

    Clause: OBJ-6.  Source: TempFlow-GRPO (arXiv 2508.04324), noise-aware weighting.

    Args:
        stds: std of every distinct step that the whole update trains.
        weighting: ``uniform`` or ``std``.
    """
    mean = sum(stds.values()) / len(stds)
    return {step: std / mean if weighting == "std" else 1.0 for step, std in stds.items()}


def plan_work(
    trees: Sequence[Tree],
    kept: Sequence[Masks],
    options: Objective,
    total_trees: int | None = None,
    owned: Sequence[Masks] | None = None,
) -> list[Work]:
    """All parents with a kept trainable edge, by tree and step, each once.

    Clause: OBJ-3, OBJ-4, ROLL-3.

    Args:
        trees: of the update, on this process.
        kept: for every tree its masks.
        options: reduction over edges.
        total_trees: trees that J averages over, those of other processes included; None counts these.
        owned: for every tree the edges that are this process's work; None means all.

    Raises:
        InputError, PlanError: see ``trainable_masks``, ``edge_coefficients``.
    """
    total = total_trees or sum(len(tree.prompts) * tree.plan.roots for tree in trees)
    work = []
    for index, (tree, masks) in enumerate(zip(trees, kept, strict=True)):
        mine = trainable_masks(tree.plan, masks)
        coefficients = edge_coefficients(tree.plan, mine, total, options.reduction)
        for step, mask in mine.items():
            todo = mask if owned is None else mask & owned[index][step]
            edges = todo.flatten().nonzero().flatten()
            if len(edges) == 0:
                continue
            parents, owner = torch.unique_consecutive(edges // tree.plan.branching[step], return_inverse=True)
            work.append(Work(index, step, parents, edges, owner, coefficients[step].flatten()[edges]))
    return work


def micro_batches(work: Sequence[Work], size: int | None) -> Iterator[list[Work]]:
    """Batches of at most ``size`` parents, of any steps, in order; None is one batch.  Clause: OBJ-7."""
    batch: list[Work] = []
    room = size or sum(len(w.parents) for w in work)
    left = room
    for item in work:
        first = 0
        while first < len(item.parents):
            last = min(len(item.parents), first + left)
            batch.append(item if last - first == len(item.parents) else item.part(first, last))
            left -= last - first
            first = last
            if left == 0:
                yield batch
                batch, left = [], room
    if batch:
        yield batch
