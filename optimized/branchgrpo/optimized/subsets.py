"""Trained-step subsets of chains as masks (spec: plan)."""

import math
from collections.abc import Sequence

import torch

from branchgrpo.optimized.pruning import Masks
from branchgrpo.reference.keys import keyed_generator
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseRole, Prompt


def subset_masks(plan: Plan, prompts: Sequence[Prompt], seed: int, iteration: int) -> Masks:
    """All edges but those of trainable steps that are in the random subset of none of their chains.

    Clause: PLAN-7, NOISE-4.  ⌊f·S⌋ of the S trainable steps a chain, at least one; at f = 1 every edge.
    Source: DanceGRPO (a random 60 % of the steps a sample).

    Args:
        plan: its trained fraction f; below 1 no trainable edge is shared by chains.
        prompts: their ids key the subsets.
        seed, iteration: of the rollout.
    """
    masks = tuple(torch.ones(len(prompts), plan.roots * n, dtype=torch.bool) for n in plan.level_sizes[1:])
    if plan.trained_fraction == 1.0:
        return masks
    steps = plan.trainable_steps
    size = max(1, math.floor(plan.trained_fraction * len(steps)))
    for step in steps:
        masks[step].fill_(False)
    for row, prompt in enumerate(prompts):
        for chain in range(plan.roots * plan.leaves):
            root, leaf = divmod(chain, plan.leaves)
            generator = keyed_generator(seed, iteration, NoiseRole.SUBSET, prompt.id, root, plan.steps, leaf)
            for step in generator.choice(steps, size=size, replace=False).tolist():
                masks[step][row, chain] = True
    return masks
