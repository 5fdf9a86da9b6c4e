"""What an update is made of: several plans at once, and the steps that each chain trains."""

import math
from collections.abc import Sequence

import torch

from branchgrpo.properties.checks.objective import Case, conditioning, flat, number
from branchgrpo.properties.exact import at_most, close, holds
from branchgrpo.properties.findings import Finding
from branchgrpo.properties.objective_definition import defined_objective, factors_of, trained_masks, trained_stds
from branchgrpo.properties.subject import Subject, offsets
from branchgrpo.properties.tolerances import PARITY
from branchgrpo.reference.keys import keyed_generator
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseRole, Prompt


def update_as_defined(subject: Subject, cases: Sequence[Case], title: str) -> list[Finding]:
    """J and its gradient over traces of several plans: the mean over all trees, step weights of all together.

    Args:
        subject: the implementation.
        cases: one a plan, with the prompts, model, options and reduction of the first.
        title: for the table.
    """
    first = cases[0]
    traces = [case.trace for case in cases]
    value = subject.implementation.objective(
        traces,
        first.model,
        offsets(first.trace.prompts, subject.device),
        [case.advantages for case in cases],
        [case.kept for case in cases],
        first.options,
        first.reduction,
        first.reference_model,
    )
    stds: dict[int, float] = {}
    for case in cases:
        stds |= trained_stds(trained_masks(case.trace.plan, case.kept), case.trace)
    factors, trees = factors_of(stds, first.options.edge_weights), [trace.plan.roots for trace in traces]
    parts = [
        roots
        * defined_objective(
            case.trace,
            first.model,
            case.advantages,
            case.kept,
            first.options,
            first.reduction,
            first.reference_model,
            factors,
        )
        for roots, case in zip(trees, cases, strict=True)
    ]
    defined = torch.stack(parts).sum() / sum(trees)
    size = max(float(case.advantages[-1].abs().max()) for case in cases) + 1.0
    growth, clause = max(conditioning(case) for case in cases), "OBJ-3 OBJ-4 OBJ-5 OBJ-6 OBJ-7"
    found, expected = (flat(first.gradient(j)) for j in (value, defined))
    name = f"{subject.name}, {title}"
    return [
        at_most(f"{name}: J as defined", clause, abs(number(value) - number(defined)), PARITY * size * growth),
        close(f"{name}: gradient as defined", clause, found, expected, PARITY * growth),
    ]


def subset_findings(
    subject: Subject, plan: Plan, prompts: Sequence[Prompt], seed: int, iteration: int
) -> list[Finding]:
    """Steps that each chain trains: those of its own key, ⌊f·S⌋ of S but at least one, and every other edge (PLAN-7).

    Args:
        subject: the implementation.
        plan: chains that share no trainable edge.
        prompts: their ids are part of the keys.
        seed, iteration: of the rollout.
    """
    masks = [mask.cpu() for mask in subject.implementation.trained_subsets(plan, prompts, seed, iteration)]
    steps = plan.trainable_steps
    size = len(steps) if plan.trained_fraction == 1.0 else max(1, math.floor(plan.trained_fraction * len(steps)))
    counts = torch.stack([masks[step] for step in steps]).sum(dim=0)
    others = [bool(mask.all()) for step, mask in enumerate(masks) if step not in steps]
    drawn = []
    for row, prompt in enumerate(prompts):
        for chain in range(plan.roots * plan.leaves):
            root, leaf = divmod(chain, plan.leaves)
            own = set(steps)
            if plan.trained_fraction < 1.0:
                stream = keyed_generator(seed, iteration, NoiseRole.SUBSET, prompt.id, root, plan.steps, leaf)
                own = set(stream.choice(steps, size=size, replace=False).tolist())
            drawn.append({step for step in steps if bool(masks[step][row, chain])} == own)
    name = f"{subject.name}, trained subsets"
    return [
        holds(f"{name}: of the chain's key", "PLAN-7 NOISE-4", drawn),
        holds(f"{name}: size", "PLAN-7", [bool((counts == size).all())], counts.numel()),
        holds(f"{name}: other steps keep all edges", "PLAN-7", others),
    ]
