"""What the first update of a case shows: trained edges, ratios and coefficients, from the objective alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from branchgrpo.conformance.case import Case, policy, reference_model
from branchgrpo.conformance.checks.base import UnsupportedError
from branchgrpo.conformance.checks.limits import COEFFICIENT
from branchgrpo.conformance.probe import Probe, edge_coefficients
from branchgrpo.conformance.record import Level
from branchgrpo.reference.implementation import Implementation, Levels, Masks, Trace
from branchgrpo.reference.options import Objective
from branchgrpo.reference.protocols import Condition

OPEN = Objective(clip_low=0.999, clip_high=0.999)
"""An objective whose clip no ratio of unchanged weights reaches, the same on both sides."""


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
