"""Trained-step subsets: which of the trainable steps each chain trains (spec: plan)."""

import math

from branchgrpo.reference.keys import keyed_generator
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseRole


def subset_size(plan: Plan) -> int:
    """⌊f·S⌋ of the S trainable steps, but at least one.  Clause: PLAN-7, DIV-P5.  Source: DanceGRPO."""
    return max(1, math.floor(plan.trained_fraction * len(plan.trainable_steps)))


def trained_subset(plan: Plan, seed: int, iteration: int, prompt: int, root: int, leaf: int) -> frozenset[int]:
    """The trained steps of one chain: a uniform subset of the trainable steps, by its own key.

    Clause: PLAN-7, NOISE-4.  Source: DanceGRPO (a random 60 % of the steps a sample).

    Args:
        plan: its ``trained_fraction`` f; at f = 1 the subset is all trainable steps.
        seed, iteration, prompt, root: of the rollout.
        leaf: index of the chain's leaf in its tree.
    """
    steps = plan.trainable_steps
    if plan.trained_fraction == 1.0:
        return frozenset(steps)
    generator = keyed_generator(seed, iteration, NoiseRole.SUBSET, prompt, root, plan.steps, leaf)
    return frozenset(generator.choice(steps, size=subset_size(plan), replace=False).tolist())
