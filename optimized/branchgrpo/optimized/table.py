"""What an update needs to know of its parents and edges, in flat arrays made once (spec: objective)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from branchgrpo.optimized.kernels import step_coefficients
from branchgrpo.optimized.log_probability import log_normaliser
from branchgrpo.optimized.tree import Levels, Tree
from branchgrpo.optimized.work import Work, micro_batches
from branchgrpo.reference.types import Reduction

OF_PARENTS = ("sigmas", "rows", "alpha", "gamma")
"""Columns of the table with an entry a parent; the others have one an edge."""


@dataclass(frozen=True, eq=False)
class Table:
    """Parents of any steps and trees, and their kept edges, on the device of the arithmetic.

    Attributes:
        sigmas: σ of every parent, in the arithmetic's dtype.
        rows: row of every parent's prompt.
        alpha, gamma: of every parent's step, in the arithmetic's dtype.
        owner: position of every edge's parent.
        stds, old_log_probs, advantages: of every edge.
        normalisers: ``log_normaliser`` of every edge.
        precisions: 1/std² of every edge, reduced like its log-probability.
        coefficients: of every edge in J; ``weights`` times the step's weight.
    """

    sigmas: Float[Tensor, "parents"]
    rows: Int64[Tensor, "parents"]
    alpha: Float[Tensor, "parents"]
    gamma: Float[Tensor, "parents"]
    owner: Int64[Tensor, "edges"]
    stds: Float64[Tensor, "edges"]
    normalisers: Float64[Tensor, "edges"]
    precisions: Float64[Tensor, "edges"]
    old_log_probs: Float64[Tensor, "edges"]
    advantages: Float64[Tensor, "edges"]
    coefficients: Float64[Tensor, "edges"]
    weights: Float64[Tensor, "edges"]

    def split(self, parents: Sequence[int], edges: Sequence[int]) -> Iterator["Table"]:
        """Tables of so many parents each, in a row, and of their edges."""
        firsts = torch.tensor([0, *accumulate(parents)][:-1]).repeat_interleave(torch.tensor(edges))
        own = replace(self, owner=self.owner - firsts.to(self.owner.device, non_blocking=True))
        lengths = {name: list(parents if name in OF_PARENTS else edges) for name in (f.name for f in fields(Table))}
        columns = [torch.split(getattr(own, name), counts) for name, counts in lengths.items()]
        return (Table(*parts) for parts in zip(*columns, strict=True))


def picked(flat: Float64[Tensor, "all"], index: Int64[Tensor, "some"]) -> Float64[Tensor, "some"]:
    """The entries at ascending distinct indices, which are all if they are as many."""
    return flat if len(index) == len(flat) else flat[index.to(flat.device, non_blocking=True)]


def tabulate(
    trees: Sequence[Tree], advantages: Sequence[Levels], work: Sequence[Work], weights: Mapping[int, float]
) -> Table:
    """The table of all parents and edges of an update, in the order of the work.  Clause: OBJ-1, OBJ-3, LOGP-3.

    Args:
        trees: of the update.
        advantages: for every tree A of every node.
        work: at least one entry.
        weights: W of every trained step.
    """
    device, dtype = trees[0].device, trees[0].dtype
    numbers, rows, owners, old, gains, first = [], [], [], [], [], 0
    for item in work:
        tree, known = trees[item.tree], trees[item.tree].log_probs[item.step]
        assert known is not None, "a trained step has log-probabilities"
        step = step_coefficients(tree.plan, item.step)
        numbers.append((tree.plan.sigmas[item.step], step.alpha, step.gamma, step.std, weights[item.step]))
        rows.append(item.parents // (tree.plan.roots * tree.plan.level_sizes[item.step]))
        owners.append(item.owner + first)
        old.append(picked(known.flatten(), item.edges).to(device, non_blocking=True))
        gains.append(picked(advantages[item.tree][item.step + 1].flatten(), item.edges))
        first += len(item.parents)
    counts = torch.tensor([(len(item.parents), len(item.edges)) for item in work])
    table = torch.tensor(numbers, dtype=torch.float64)
    edges = table[:, 3:].repeat_interleave(counts[:, 1], dim=0, output_size=sum(len(item.edges) for item in work))
    parents = table[:, :3].repeat_interleave(counts[:, 0], dim=0, output_size=first).to(dtype)
    coefficients = torch.cat([item.coefficient for item in work])
    on_cpu = (*parents.unbind(1), *edges.unbind(1), coefficients, torch.cat(gains), torch.cat(rows), torch.cat(owners))
    placed = [column.contiguous().to(device, non_blocking=True) for column in on_cpu]
    stds, reduction, elements = placed[3], trees[0].reduction, math.prod(trees[0].states[0].shape[2:])
    return Table(
        sigmas=placed[0],
        alpha=placed[1],
        gamma=placed[2],
        stds=stds,
        normalisers=log_normaliser(stds, elements, reduction),
        precisions=stds.square().reciprocal_().mul_(1.0 if reduction is Reduction.SUM else 1.0 / elements),
        weights=placed[5] * placed[4],
        coefficients=placed[5],
        advantages=placed[6],
        rows=placed[7],
        owner=placed[8],
        old_log_probs=torch.cat(old),
    )


def table_batches(table: Table, work: Sequence[Work], size: int | None) -> Iterator[tuple[list[Work], Table]]:
    """Batches of at most ``size`` parents, each with its part of the table; None is one batch.  Clause: OBJ-7."""
    batches = list(micro_batches(work, size))
    parents = [sum(len(item.parents) for item in batch) for batch in batches]
    edges = [sum(len(item.edges) for item in batch) for batch in batches]
    return zip(batches, table.split(parents, edges), strict=True)
