"""Prompts or sub-trees over several ranks: who owns what, and how the tail sees the whole (spec: normalization).

Sub-trees over ranks save calls and time, not address space: a rank's arrays have the whole tree's shape, so that flat
indices mean the same on every rank. Each rank allocates nodes × D × bytes an element: 1.5 GiB a prompt for the 3,069
nodes of ``branchgrpo-k4`` (256 leaves) with latents of 16 × 128 × 128 in bf16. What a rank does not grow it never
writes, so that on a CPU no memory is committed to it; on a GPU it is, unless states are offloaded.
"""

from dataclasses import replace

import torch

from branchgrpo.optimized.pruning import Masks
from branchgrpo.optimized.ranks import Ranks, Share
from branchgrpo.optimized.tree import Levels, Tree
from branchgrpo.reference.plan import Plan


def owned_edges(plan: Plan, prompts: int, share: Share) -> Masks:
    """The edges that this rank trains: those it grew, and a range of the parents of those that every rank grew.

    Every edge has exactly one owner, and all children of one parent have the same.

    Args:
        plan: of the trees.
        prompts: number of prompts.
        share: as in the rollout.
    """
    masks = []
    cut = share.owned(prompts * plan.roots * plan.level_sizes[min(share.depth, plan.steps)])
    for step in range(plan.steps):
        parents = prompts * plan.roots * plan.level_sizes[step]
        mine = share.owned(parents)
        if step >= share.depth:
            factor = plan.level_sizes[step] // plan.level_sizes[share.depth]
            mine = range(cut.start * factor, cut.stop * factor)
        mask = torch.zeros(parents, plan.branching[step], dtype=torch.bool)
        mask[mine.start : mine.stop] = True
        masks.append(mask.reshape(prompts, -1))
    return tuple(masks)


def owned_leaves(plan: Plan, prompts: int, share: Share) -> range:
    """Flat indices, prompts outermost, of the leaves that this rank grew."""
    cut = share.owned(prompts * plan.roots * plan.level_sizes[share.depth])
    factor = plan.leaves // plan.level_sizes[share.depth]
    return range(cut.start * factor, cut.stop * factor)


def gather_log_probs(tree: Tree, share: Share, ranks: Ranks) -> Tree:
    """The same tree with the log-probabilities of all ranks' sub-trees; states stay where they were grown.

    A log-probability that this rank did not grow is 0 in its own arrays, so their sum over the ranks is exact; levels
    down to the shared depth are every rank's own already.
    """
    log_probs = [
        lp if lp is None or depth <= share.depth else ranks.summed(lp).to(lp.device)
        for depth, lp in enumerate(tree.log_probs, start=1)
    ]
    return replace(tree, log_probs=tuple(log_probs))


def gather_levels(values: Levels, ranks: Ranks) -> tuple[Levels, slice]:
    """Values of all ranks' prompts, in rank order, and where this rank's rows are among them.

    Clause: NORM-2.  What is then computed from them is bit-identical on every rank, and to one process's result.

    Args:
        values: this rank's, ``[prompts, R·n_d, *rest]`` float64.
        ranks: each with prompts of its own, any number.
    """
    rows = len(values[0])
    first = ranks.first_row(rows)
    return tuple(ranks.rows(level) for level in values), slice(first, first + rows)
