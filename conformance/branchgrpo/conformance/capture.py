"""Driving an implementation through one case: everything that a trace holds, from its operations alone."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from branchgrpo.conformance.checks.base import UnsupportedError
from branchgrpo.conformance.checks.limits import COEFFICIENT
from branchgrpo.conformance.probe import Probe, edge_coefficients
from branchgrpo.conformance.record import Dtypes, Level, Record, RewardInfo
from branchgrpo.conformance.subjects import Network, condition_for
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.implementation import Implementation, Levels, Masks, Trace
from branchgrpo.reference.method import Method
from branchgrpo.reference.options import Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, NoiseSource, Prompt, RewardModel
from branchgrpo.reference.windows import WindowedPlan, WindowSchedule

Part = TypeVar("Part")
OPEN = Objective(clip_low=0.999, clip_high=0.999)
"""An objective whose clip no ratio of unchanged weights reaches, the same on both sides."""


@dataclass(frozen=True, eq=False)
class Backbone:
    """A velocity model with the prompts that it is asked for and their condition, one item a prompt."""

    model: torch.nn.Module
    prompts: tuple[Prompt, ...]
    condition: Condition


@dataclass(frozen=True)
class Case:
    """What an implementation is asked to do.

    Attributes:
        method: sampler, reduction and options.
        rewards, weights: reward models and their weights.
        prompts: number of prompts.
        latent: shape of a state.
        dtype, storage: of the arithmetic and of stored states.
        iteration, seed: of the keyed noise, windows and subsets.
        training: also drive the objective: ratios and coefficients.
        backbone: a velocity of somebody's run instead of the small network, with its prompts; no KL then.
    """

    method: Method
    rewards: tuple[RewardModel, ...]
    weights: tuple[float, ...] = (1.0,)
    prompts: int = 2
    latent: tuple[int, ...] = (4, 6)
    dtype: torch.dtype = torch.float64
    storage: torch.dtype = torch.float64
    iteration: int = 0
    seed: int = 7
    training: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backbone: Backbone | None = None

    @property
    def prompt_list(self) -> tuple[Prompt, ...]:
        """The backbone's prompts, or prompts with the ids 1, 2 and so on."""
        if self.backbone is not None:
            return tuple(self.backbone.prompts)
        return tuple(Prompt(i + 1, f"prompt {i + 1}") for i in range(self.prompts))

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of a rollout."""
        return {
            "latent_shape": self.latent,
            "dtype": self.dtype,
            "storage_dtype": self.storage,
            "reduction": self.method.log_prob,
            "iteration": self.iteration,
        }


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


@dataclass(frozen=True, eq=False)
class Update:
    """One update to drive: traces with their advantages and trained edges."""

    traces: Sequence[Trace]
    advantages: Sequence[Levels]
    masks: Sequence[Masks]


def coefficients(
    implementation: Implementation, case: Case, update: Update, condition: Condition, options: Objective
) -> list[Level]:
    """∂J/∂log p of every stochastic edge, one entry a trace; siblings are told apart by their elements.

    Raises:
        UnsupportedError: more siblings than elements, so that their coefficients are not determined.
    """
    most = max(factor for trace in update.traces for factor in trace.plan.branching)
    if most > math.prod(case.latent):
        raise UnsupportedError(f"{most} siblings, latents of {math.prod(case.latent)} elements: edges not told apart")
    probe = Probe(policy(case), update.traces).to(case.device)
    frozen = reference_model(case) if options.kl > 0 else None
    value = implementation.objective(
        update.traces, probe, condition, update.advantages, update.masks, options, case.method.log_prob, frozen
    )
    raw = torch.autograd.grad(value, list(probe.offsets), allow_unused=True)
    gradients = [torch.zeros_like(p) if g is None else g for g, p in zip(raw, probe.offsets, strict=True)]
    reduction = case.method.log_prob
    return [edge_coefficients(probe, gradients, t, trace, reduction) for t, trace in enumerate(update.traces)]


def trained_edges(
    implementation: Implementation, case: Case, update: Update, condition: Condition
) -> list[dict[int, Bool[Tensor, "prompts _"]]]:
    """E as the objective takes it: with advantage 1 everywhere exactly its edges have a coefficient."""
    ones = [tuple(torch.ones_like(level) for level in levels) for levels in update.advantages]
    found = coefficients(implementation, case, replace(update, advantages=ones), condition, OPEN)
    trained = []
    for trace, level in zip(update.traces, found, strict=True):
        floor = max((float(x.abs().max()) for x in level.values()), default=0.0) * COEFFICIENT
        none = {d: torch.zeros(trace.states[d].shape[:2], dtype=torch.bool) for d in range(1, len(trace.states))}
        trained.append(none | {depth: x.cpu().abs() > floor for depth, x in level.items()})
    return trained


def conditions(case: Case) -> Condition:
    """One condition a prompt of the case."""
    if case.backbone is not None:
        return case.backbone.condition
    return condition_for(case.prompt_list, case.dtype, case.device)


def policy(case: Case) -> Any:
    """v_θ of a case: a ``VelocityModel`` that is a module."""
    if case.backbone is not None:
        return case.backbone.model.to(case.device)
    return Network(math.prod(case.latent), dtype=case.dtype).to(case.device)


def reference_model(case: Case) -> Network:
    """The frozen policy of a case with KL."""
    return Network(math.prod(case.latent), scale=0.6, dtype=case.dtype).to(case.device)


def ratios(implementation: Implementation, case: Case, trace: Trace, masks: Level, condition: Condition) -> Level:
    """ρ of every trained edge: the objective of that edge alone, with advantage 1 and no clip in reach."""
    model, found = policy(case), {}
    for depth in (step + 1 for step in trace.plan.stochastic_steps):
        found[depth] = torch.ones(trace.states[depth].shape[:2], dtype=torch.float64)
        for prompt, column in masks[depth].nonzero().tolist():
            alone, row = one_prompt(trace, prompt), condition.gather(torch.tensor([prompt]))
            advantages, only = single_edge(alone, depth, column)
            with torch.no_grad():
                value = implementation.objective(
                    [alone], model, row, [advantages], [only], OPEN, case.method.log_prob, None
                )
            found[depth][prompt, column] = value.cpu() * alone.plan.roots
    return found


def one_prompt(trace: Trace, prompt: int) -> Trace:
    """The trace of one prompt."""
    pick = slice(prompt, prompt + 1)
    return replace(
        trace,
        prompts=trace.prompts[pick],
        states=tuple(level[pick] for level in trace.states),
        means=tuple(level[pick] for level in trace.means),
        log_probs=tuple(None if level is None else level[pick] for level in trace.log_probs),
    )


def single_edge(trace: Trace, depth: int, column: int) -> tuple[Levels, Masks]:
    """Advantage 1 for one edge, in masks that keep its twins in the other roots' trees, whose advantage is 0."""
    shapes, device = [state.shape[:2] for state in trace.states], trace.states[0].device
    advantages = tuple(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes)
    only = tuple(torch.zeros(shape, dtype=torch.bool, device=device) for shape in shapes[1:])
    advantages[depth][0, column] = 1.0
    size = trace.plan.level_sizes[depth]
    only[depth - 1][0, column % size :: size] = True
    return advantages, only


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


def training_levels(
    implementation: Implementation, case: Case, update: Update, condition: Condition
) -> list[dict[str, Level]]:
    """What the first update shows, one entry a trace: trained edges, ratios, coefficients, weight versions."""
    trained = trained_edges(implementation, case, update, condition)
    due = coefficients(implementation, case, update, condition, case.method.objective)
    found = []
    for trace, edges, level in zip(update.traces, trained, due, strict=True):
        rho = numbered_level(ratios(implementation, case, trace, edges, condition))
        versions = {depth: torch.zeros_like(x, dtype=torch.int64) for depth, x in rho.items()}
        parts: dict[str, Level] = {"trainable": dict(edges), "gradients": numbered_level(level)}
        found.append({**parts, "ratios": rho, "weight_versions": versions})
    return found


def numbered_level(level: Level) -> Level:
    """A level on the CPU, in float64."""
    return {depth: array.detach().double().cpu() for depth, array in level.items()}


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
