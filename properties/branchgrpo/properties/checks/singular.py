"""Plan families: shared anchor and children, noise at step k alone, granular advantages, degenerations."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from branchgrpo.oracle.chain import affine_chain
from branchgrpo.oracle.laws import given_node, leaf_law
from branchgrpo.properties.checks.laws import DATA, gaussian_model
from branchgrpo.properties.definitions import Array, normalised_level
from branchgrpo.properties.exact import all_close, as_array, at_most, close, holds
from branchgrpo.properties.findings import Finding
from branchgrpo.properties.networks import Elementwise
from branchgrpo.properties.samples import leaves, standardised
from branchgrpo.properties.sources import MaskedNoise
from branchgrpo.properties.statistics.correlation import correlation_test
from branchgrpo.properties.statistics.mean import mean_test
from branchgrpo.properties.statistics.variance import variance_test
from branchgrpo.properties.subject import Draws, Subject, numbered_prompts
from branchgrpo.properties.tolerances import EXACT, PARITY
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.implementation import Levels, Trace
from branchgrpo.reference.options import Fusion, Normalization
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseRole, NoiseSource, Prompt
from branchgrpo.reference.types import ODE

Members = dict[tuple[int, int], Trace]


def children(level: Tensor, family: PlanFamily) -> Array:
    """``[prompts, R·G, …]`` → ``[prompts, R, G, …]``."""
    return as_array(level).reshape(level.shape[0], family.roots, family.group, *level.shape[2:])


def sharing_findings(subject: Subject, family: PlanFamily, members: Members) -> list[Finding]:
    """All members share the anchor; for one k all granularities share the children (SING-3).

    Also: only step k has log-probabilities, and every granularity ends at σ = 0 (SING-2, GRAN-1).
    """
    anchor = members[family.ks[-1], family.granularities[0]]
    pairs, only, ends = [], [], []
    for (k, granularity), trace in members.items():
        first = members[k, family.granularities[0]]
        pairs += [(trace.states[d], anchor.states[d]) for d in range(k + 1)]
        pairs.append((trace.states[k + 1], first.states[k + 1]))
        only.append([i for i, edges in enumerate(trace.log_probs) if edges is not None] == [k])
        ends.append(trace.plan == family.member(k, granularity) and trace.plan.sigmas[-1] == 0.0)
    found, expected = zip(*pairs, strict=True)
    name = f"{subject.name}, family"
    return [
        all_close(f"{name}: shared anchor and children", "SING-3", found, expected, PARITY),
        holds(f"{name}: log-probabilities at step k only", "SING-2", only),
        holds(f"{name}: members are the family's, down to σ = 0", "SING-1 GRAN-1 GRAN-2", ends),
    ]


def is_private_at(at: int, role: NoiseRole, depth: int) -> bool:
    """Whether a draw is a child's own at a depth."""
    return role is NoiseRole.PRIVATE and depth == at


def is_spare(at: int, role: NoiseRole, depth: int) -> bool:
    """Whether a draw is neither a root state nor a child's own at a depth."""
    return role is not NoiseRole.ROOT and not is_private_at(at, role, depth)


def singular_noise(
    subject: Subject, family: PlanFamily, source: NoiseSource, prompts: Sequence[Prompt]
) -> list[Finding]:
    """Only the root and step k's private draws move the leaves: all other draws can be 0 (SING-1, SING-2)."""
    model = Elementwise().to(subject.device)
    base = subject.grow_family(family, model, source, prompts)
    errors, moved = [], []
    for k in family.ks:
        own = MaskedNoise(source, partial(is_spare, k + 1))
        without = MaskedNoise(source, partial(is_private_at, k + 1))
        single = replace(family, ks=(k,))
        kept, gone = (subject.grow_family(single, model, s, prompts) for s in (own, without))
        for granularity in family.granularities:
            leaf = base[k, granularity].states[-1]
            errors.append(float((kept[k, granularity].states[-1] - leaf).abs().max()))
            moved.append(not torch.equal(gone[k, granularity].states[-1], leaf))
    name = f"{subject.name}, family"
    return [
        at_most(f"{name}: no other noise moves a leaf", "SING-1 SING-2", max(errors), EXACT, len(errors)),
        holds(f"{name}: step k's noise does", "SING-2", moved),
    ]


def granular_definition(
    subject: Subject,
    family: PlanFamily,
    k: int,
    rewards: dict[int, Array],
    weights: Sequence[float],
    options: Normalization,
) -> list[Finding]:
    """A of step k's children: z-scores a granularity and reward, summed, clipped once (GRAN-4, GRAN-5).

    Args:
        subject: the implementation.
        family: the family.
        k: perturbed step.
        rewards: for every λ ``[prompts, R·G, models]``.
        weights: one a reward model.
        options: of the normalization.
    """
    values = {granularity: child_levels(family.member(k, granularity), table) for granularity, table in rewards.items()}
    found = subject.implementation.granular_advantages(family, k, values, weights, options)
    total = np.zeros(found.shape)
    for table in rewards.values():
        columns = table.reshape(len(table), family.roots, family.group, -1)
        if options.order == "sum_then_normalize":
            total += normalised_level(columns @ np.asarray(weights), options).reshape(total.shape)
        else:
            total += sum(
                w * normalised_level(columns[..., m], options).reshape(total.shape) for m, w in enumerate(weights)
            )
    expected = np.clip(total, -options.clip, options.clip)
    return [close(f"{subject.name}, granular advantages: as defined", "GRAN-4 GRAN-5", found, expected, PARITY)]


def child_levels(plan: Plan, rewards: Array) -> Levels:
    """Values of all nodes of a member: means of the rewards below them."""
    prompts, models = rewards.shape[0], rewards.shape[2]
    levels = [rewards.reshape(prompts, plan.roots * n, -1, models).mean(axis=2) for n in plan.level_sizes]
    return tuple(torch.from_numpy(np.ascontiguousarray(level)) for level in levels)


def single_split_plan(family: PlanFamily, k: int) -> Plan:
    """The plan of the full schedule with one split at k and ODE elsewhere (GRAN-6)."""
    steps = range(family.steps)
    return Plan(
        sigmas=family.sigmas,
        kernels=tuple(family.kernel if i == k else ODE for i in steps),
        branching=tuple(family.group if i == k else 1 for i in steps),
        spreads=(float("inf"),) * family.steps,
        roots=family.roots,
        output=family.output,
    )


def one_granularity_findings(
    subject: Subject, family: PlanFamily, source: NoiseSource, prompts: Sequence[Prompt]
) -> list[Finding]:
    """With Λ = {1} a member is the plan with one split at k: states, log-probabilities, advantages (GRAN-6)."""
    single, model = replace(family, granularities=(1,)), Elementwise().to(subject.device)
    members = subject.grow_family(single, model, source, prompts)
    found, expected = [], []
    for k in single.ks:
        plan = single_split_plan(single, k)
        trace, member = subject.grow(plan, model, source, prompts), members[k, 1]
        rewards = member.states[-1].double().flatten(2).sum(dim=2, keepdim=True).cpu()
        values = subject.implementation.fuse(trace, rewards, Fusion(beta=0.0))
        levels = subject.implementation.normalize(plan, values, (1.0,), Normalization())
        own = subject.implementation.granular_advantages(
            single, k, {1: subject.implementation.fuse(member, rewards, Fusion())}, (1.0,), Normalization()
        )
        old, new = member.log_probs[k], trace.log_probs[k]
        assert old is not None
        assert new is not None
        found += [*member.states, old, own]
        expected += [*trace.states, new, levels[k + 1]]
    return [all_close(f"{subject.name}, Λ = {{1}} is a plan with one split", "GRAN-6", found, expected, PARITY)]


def child_law(subject: Subject, family: PlanFamily, source: NoiseSource, size: int) -> list[Finding]:
    """Law of each child's leaf given the shared anchor: mean, variance, and independence of siblings (SING-2)."""
    prompts = numbered_prompts(8)
    model = gaussian_model(subject, family.member(*next(family.members())))
    with torch.no_grad():
        members = subject.grow_family(family, model, source, prompts, Draws((size,)))
    found = []
    for (k, granularity), trace in members.items():
        chain = affine_chain(trace.plan, DATA)
        centre, variance = leaf_law(chain, given_node(np.zeros(1), k))
        anchor = as_array(trace.states[k])[:, :1]
        gain = float(np.prod(chain.alpha[k:]))
        deviation = leaves(trace) - gain * anchor - float(centre[0])
        first, second = (standardised(deviation[:, i], 0.0, variance) for i in (0, 1))
        name = f"{subject.name}, child of step {k}, λ = {granularity}"
        found += [
            mean_test(first).finding(name, "SING-2 GRAN-1"),
            variance_test(first).finding(name, "SING-2 GRAN-1"),
        ]
        if granularity == family.granularities[0]:
            found.append(correlation_test(first, second).finding(f"{name}, siblings", "SING-1"))
    return found
