"""Driving an implementation through one case: everything that a trace holds, from its operations alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.conformance.case import Case, conditions, policy
from branchgrpo.conformance.checks.base import UnsupportedError
from branchgrpo.conformance.record import Dtypes, Level, Record, RewardInfo
from branchgrpo.conformance.training_levels import Update, training_levels
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.implementation import Implementation, Levels, Masks, Trace
from branchgrpo.reference.method import Method
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseSource, RewardModel
from branchgrpo.reference.windows import WindowedPlan, WindowSchedule

Part = TypeVar("Part")


def score(trace: Trace, models: Sequence[RewardModel]) -> Float64[Tensor, "prompts leaves models"]:
    """Rewards of every leaf of a trace."""
    leaves = trace.states[-1]
    prompts = [prompt for prompt in trace.prompts for _ in range(leaves.shape[1])]
    columns = [model(leaves.flatten(0, 1), prompts).reshape(leaves.shape[:2]) for model in models]
    return torch.stack(columns, dim=-1).double()


def allowed_masks(implementation: Implementation, case: Case, plan: Plan, kept: Masks) -> Masks:
    """Kept edges that the chains' subsets let train, where chains have subsets (PLAN-7)."""
    if plan.trained_fraction == 1.0:
        return kept
    subsets = implementation.trained_subsets(plan, case.prompt_list, case.seed, case.iteration)
    return tuple(a & b for a, b in zip(kept, subsets, strict=True))


def record_of(case: Case, trace: Trace, method: Method) -> Record:
    """What a rollout alone gives."""
    names = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    plan = trace.plan
    return Record(
        plan=plan,
        iteration=case.iteration,
        prompts=tuple(trace.prompts),
        reduction=method.log_prob,
        dtypes=Dtypes(names[case.dtype], names[case.storage], names[case.dtype]),
        reward_models=tuple(RewardInfo(m.name, m.version, w) for m, w in zip(case.rewards, case.weights, strict=True)),
        fusion=method.fusion,
        normalization=method.normalization,
        pruning=method.pruning,
        objective=method.objective,
        stds=trace.stds.double().cpu(),
        levels={
            "states": dict(enumerate(level.cpu() for level in trace.states)),
            "means": {d + 1: level.cpu() for d, level in enumerate(trace.means)},
            "log_probs": {d + 1: level.cpu() for d, level in enumerate(trace.log_probs) if level is not None},
        },
        window=window_of(method),
        seed=case.seed,
    )


def window_of(method: Method) -> WindowSchedule | None:
    """The window schedule of a method whose plan moves."""
    return method.sampler.window if isinstance(method.sampler, WindowedPlan) else None


def numbered(levels: Sequence[Tensor], first: int = 0) -> Level:
    """Levels by depth, on the CPU."""
    return {first + d: level.cpu() for d, level in enumerate(levels)}


def attempt(action: Callable[[], Part]) -> Part | None:
    """What an operation answers, or None where the subject says that it cannot do what is asked."""
    try:
        return action()
    except UnsupportedError:
        return None


def kept_edges(implementation: Implementation, case: Case, plan: Plan, values: Levels) -> Masks | None:
    """Masks of the case's rules, or None without the operation; keys of one reward model need none (PRUNE-2)."""
    method, has = case.method, implementation.capabilities
    if "prune" not in has:
        return None
    if "leaf_keys" in has:
        keys = implementation.leaf_keys(plan, values, case.weights, method.normalization)
    elif len(case.weights) == 1:
        keys = values[-1][..., 0] * case.weights[0]
    else:
        return None
    return implementation.prune(plan, keys, method.pruning, case.iteration)


def every_edge(trace: Trace) -> Masks:
    """Masks that keep all edges."""
    return tuple(torch.ones(s.shape[:2], dtype=torch.bool, device=s.device) for s in trace.states[1:])


def tail_levels(implementation: Implementation, case: Case, trace: Trace, rewards: Tensor) -> dict[str, Level]:
    """What follows a rollout, as far as the operations reach: values, advantages, kept edges, the first update.

    What an operation that is missing, or that answers with ``UnsupportedError``, would have given is absent from the
    record, and so is what is made from it.
    """
    method, plan, has = case.method, trace.plan, implementation.capabilities
    levels: dict[str, Level] = {}
    kept = advantages = None
    values = attempt(lambda: implementation.fuse(trace, rewards, method.fusion)) if "fuse" in has else None
    if values is not None:
        levels["values"] = numbered(values)
        kept = attempt(lambda: kept_edges(implementation, case, plan, values))
        if "normalize" in has:
            advantages = attempt(lambda: implementation.normalize(plan, values, case.weights, method.normalization))
    if kept is not None:
        levels["kept"] = numbered(kept, 1)
    if advantages is not None:
        levels["advantages"] = numbered(advantages)
    edges = kept if kept is not None else None if method.pruning else every_edge(trace)
    if case.training and edges is not None and "objective" in has:
        masks = allowed_masks(implementation, case, plan, edges)
        update = Update([trace], [advantages or zeros_of(trace)], [masks])
        found = attempt(lambda: training_levels(implementation, case, update, conditions(case)))
        if found is not None and advantages is None:
            found[0].pop("gradients")  # of advantages that the subject did not make
        levels |= found[0] if found is not None else {}
    return levels


def zeros_of(trace: Trace) -> Levels:
    """Advantages 0, where a subject makes none."""
    return tuple(torch.zeros(s.shape[:2], dtype=torch.float64, device=s.device) for s in trace.states)


def capture_plan(implementation: Implementation, case: Case, noise: NoiseSource) -> list[Record]:
    """The record of a case whose sampler is a plan at its iteration."""
    method, plan = case.method, case.method.plan_at(case.iteration, case.seed)
    assert isinstance(plan, Plan)
    trace = implementation.rollout(plan, policy(case), case.prompt_list, conditions(case), noise, **case.sampling())
    rewards = score(trace, case.rewards)
    record = record_of(case, trace, method).with_levels(**tail_levels(implementation, case, trace, rewards))
    return [replace(record, rewards=rewards.cpu())]


def capture_family(implementation: Implementation, case: Case, noise: NoiseSource) -> list[Record]:
    """The records of a plan family: one a member; those of the first granularity carry advantages."""
    method, family = case.method, case.method.plan_at(case.iteration, case.seed)
    assert isinstance(family, PlanFamily)
    condition = conditions(case)
    model = policy(case)
    traces = implementation.singular_rollout(family, model, case.prompt_list, condition, noise, **case.sampling())
    rewards = {member: score(trace, case.rewards) for member, trace in traces.items()}
    values = {member: implementation.fuse(trace, rewards[member], method.fusion) for member, trace in traces.items()}
    first = family.granularities[0]
    advantages = {}
    for k in family.ks:
        own = {g: values[k, g] for g in family.granularities}
        children = implementation.granular_advantages(family, k, own, case.weights, method.normalization)
        levels = [torch.zeros(state.shape[:2], dtype=torch.float64) for state in traces[k, first].states]
        levels[k + 1] = children
        advantages[k, first] = tuple(level.to(case.device) for level in levels)
    trained = [traces[member] for member in advantages]
    masks = [tuple(torch.ones(s.shape[:2], dtype=torch.bool, device=s.device) for s in t.states[1:]) for t in trained]
    update = Update(trained, list(advantages.values()), masks)
    training = training_levels(implementation, case, update, condition) if case.training else [{} for _ in trained]
    extra = dict(zip(advantages, training, strict=True))
    records = []
    for member, trace in traces.items():
        levels_of = {"values": numbered(values[member])} | extra.get(member, {})
        if member in advantages:
            levels_of["advantages"] = numbered(advantages[member])
        record = record_of(case, trace, method).with_levels(**levels_of)
        records.append(replace(record, member=member, rewards=rewards[member].cpu()))
    return records


def capture(implementation: Implementation, case: Case, noise: NoiseSource) -> list[Record]:
    """Drive an implementation through one case.

    Args:
        implementation: what is judged.
        case: what it is asked to do.
        noise: standard normal numbers, passed in.

    Returns:
        One record, or one a member of a plan family.
    """
    if isinstance(case.method.sampler, PlanFamily):
        return capture_family(implementation, case, noise)
    return capture_plan(implementation, case, noise)
