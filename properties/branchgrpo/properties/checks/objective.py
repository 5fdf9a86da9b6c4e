"""The objective and its gradient: as defined, by differences, pruned against unpruned, whatever the batching."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from branchgrpo.properties.exact import all_close, at_most, close, holds
from branchgrpo.properties.findings import Finding
from branchgrpo.properties.objective_definition import (
    defined_objective,
    edge_coefficients,
    step_factors,
    trained_masks,
)
from branchgrpo.properties.subject import Subject, all_kept
from branchgrpo.properties.tolerances import EXACT, FINITE_DIFFERENCE, PARITY
from branchgrpo.reference.implementation import Levels, Masks, Trace
from branchgrpo.reference.options import Objective
from branchgrpo.reference.protocols import VelocityModel
from branchgrpo.reference.types import Reduction

Gradient = list[Tensor]


@dataclass(frozen=True, eq=False)
class Case:
    """One update.

    Attributes:
        trace: a rollout.
        model: the policy to update, a module; not the one that made the rollout if ratios are to differ from 1.
        advantages, kept: of the rollout.
        options, reduction: of the objective.
        reference_model: given if and only if the objective has a KL term.
    """

    trace: Trace
    model: VelocityModel
    advantages: Levels
    kept: Masks
    options: Objective
    reduction: Reduction = Reduction.MEAN
    reference_model: VelocityModel | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of the policy."""
        assert isinstance(self.model, nn.Module)
        return list(self.model.parameters())

    def value(self, subject: Subject, advantages: Levels | None = None, kept: Masks | None = None) -> Tensor:
        """J by the implementation, with other advantages or masks on demand."""
        return subject.objective(
            self.trace,
            self.model,
            self.advantages if advantages is None else advantages,
            self.kept if kept is None else kept,
            self.options,
            self.reduction,
            self.reference_model,
        )

    def gradient(self, value: Tensor) -> Gradient:
        """∂J a parameter; zero where J does not depend on one."""
        found = torch.autograd.grad(value, self.parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, found, strict=True)]


def number(value: Tensor) -> float:
    """A scalar that may carry a graph, as a float."""
    return float(value.detach())


def flat(gradient: Gradient) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([g.detach().double().cpu().flatten() for g in gradient])


def objective_as_defined(subject: Subject, case: Case, title: str = "objective") -> list[Finding]:
    """J and its gradient against the definition (OBJ-1 … OBJ-7)."""
    value = case.value(subject)
    defined = defined_objective(
        case.trace,
        case.model,
        case.advantages,
        case.kept,
        case.options,
        case.reduction,
        case.reference_model,
    )
    clause = "OBJ-1 OBJ-2 OBJ-3 OBJ-4 OBJ-6 OBJ-7" + (" OBJ-5" if case.reference_model is not None else "")
    name = f"{subject.name}, {title}"
    size = float(case.advantages[-1].abs().max()) + 1.0
    return [
        at_most(f"{name}: J as defined", clause, abs(number(value) - number(defined)), PARITY * size),
        close(
            f"{name}: gradient as defined",
            clause,
            flat(case.gradient(value)),
            flat(case.gradient(defined)),
            PARITY * conditioning(case),
        ),
    ]


def conditioning(case: Case) -> float:
    """How much rounding of the means grows on the way to a gradient: max |mean|/std over the trained steps.

    z = (x − μ)/std carries u·|μ|/std, and the gradient is linear in z.
    """
    worst = 1.0
    for step in case.trace.plan.trainable_steps:
        worst = max(worst, float(case.trace.means[step].abs().max()) / float(case.trace.stds[step]))
    return worst


def differences_findings(subject: Subject, case: Case, direction: int) -> list[Finding]:
    """The gradient along a random direction of the parameters against a central difference of J."""
    generator = torch.Generator().manual_seed(direction)
    steps = [torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device) for p in case.parameters]
    slope = sum(float((g * s).sum()) for g, s in zip(case.gradient(case.value(subject)), steps, strict=True))
    h, values = 1e-5, []
    with torch.no_grad():
        for sign in (1.0, -1.0):
            for p, s in zip(case.parameters, steps, strict=True):
                p.add_(sign * h * s)
            values.append(float(case.value(subject)))
            for p, s in zip(case.parameters, steps, strict=True):
                p.sub_(sign * h * s)
    difference = (values[0] - values[1]) / (2.0 * h)
    error = abs(slope - difference) / max(1.0, abs(slope))
    return [at_most(f"{subject.name}, objective: gradient by differences", "OBJ-7", error, FINITE_DIFFERENCE)]


def reweighted(case: Case) -> Levels:
    """Advantages with which the unpruned run has the pruned gradient: A_e·(weight in E)/(weight in all), 0 if dropped.

    The surrogate is homogeneous in A ≥ 0 and A ≤ 0 alike, so scaling an edge's advantage scales its g_e (PRUNE-6).
    """
    trace, options = case.trace, case.options
    everything = all_kept(trace.plan, len(trace.prompts))
    masks = {name: trained_masks(trace.plan, kept) for name, kept in (("kept", case.kept), ("all", everything))}
    weights = {name: edge_coefficients(mask, options.reduction) for name, mask in masks.items()}
    factors = {name: step_factors(mask, trace, options.edge_weights) for name, mask in masks.items()}
    levels = [torch.zeros_like(level) for level in case.advantages]
    for step in trace.plan.trainable_steps:
        scale = weights["kept"][step] / weights["all"][step] * factors["kept"].get(step, 0.0) / factors["all"][step]
        old = case.advantages[step + 1]
        levels[step + 1] = old * scale.reshape(old.shape).to(old.device)
    return tuple(levels)


def gradient_parity(subject: Subject, case: Case, title: str) -> list[Finding]:
    """The pruned gradient is Σ_kept g_e over the kept edges' normaliser, each g_e from the unpruned run (PRUNE-6)."""
    everything = all_kept(case.trace.plan, len(case.trace.prompts))
    pruned = flat(case.gradient(case.value(subject)))
    unpruned = flat(case.gradient(case.value(subject, reweighted(case), everything)))
    tolerance = PARITY * conditioning(case)
    return [close(f"{subject.name}, gradient parity, {title}", "PRUNE-6 OBJ-4", pruned, unpruned, tolerance)]


def one_edge(case: Case, step: int, edge: int) -> Levels:
    """Advantages that are zero but at one edge of the first tree."""
    levels = [torch.zeros_like(level) for level in case.advantages]
    levels[step + 1].view(-1)[edge] = 1.0
    return tuple(levels)


def edgewise_parity(subject: Subject, case: Case, edges: Sequence[tuple[int, int]], title: str) -> list[Finding]:
    """Edge by edge: a kept edge has the g_e of the unpruned run, a dropped one has gradient exactly 0 (PRUNE-6)."""
    trace = case.trace
    everything = all_kept(trace.plan, len(trace.prompts))
    kept, unpruned = trained_masks(trace.plan, case.kept), trained_masks(trace.plan, everything)
    before, after = (edge_coefficients(m, case.options.reduction) for m in (unpruned, kept))
    old, new = (step_factors(m, trace, case.options.edge_weights) for m in (unpruned, kept))
    found, expected, leaks = [], [], 0.0
    for step, edge in edges:
        single = one_edge(case, step, edge)
        mine = flat(case.gradient(case.value(subject, single)))
        if not bool(kept[step].flatten()[edge]):
            leaks = max(leaks, float(mine.abs().max()))
            continue
        theirs = flat(case.gradient(case.value(subject, single, everything)))
        found.append(mine / float(after[step].flatten()[edge]) / new[step])
        expected.append(theirs / float(before[step].flatten()[edge]) / old[step])
    name = f"{subject.name}, gradient parity, {title}"
    rows = [at_most(f"{name}: dropped edges leak nothing", "PRUNE-6 OBJ-3", leaks, EXACT, len(edges))]
    if found:
        tolerance = PARITY * conditioning(case)
        rows.append(all_close(f"{name}: g_e of kept edges", "PRUNE-6", found, expected, tolerance))
    return rows


Accumulate = Callable[[Case, int | None], tuple[Gradient, float]]
"""Gradient of J accumulated over micro-batches of at most that many parents, and J."""


def micro_batch_findings(subject: Subject, case: Case, accumulate: Accumulate, sizes: Sequence[int]) -> list[Finding]:
    """Gradient and J are those of the whole, whatever the micro-batch (OBJ-7)."""
    value = case.value(subject)
    whole, found = flat(case.gradient(value)), []
    tolerance = PARITY * conditioning(case)
    for size in (None, *sizes):
        gradient, total = accumulate(case, size)
        name = f"{subject.name}, micro-batches"
        found.append(close(f"{name}: gradient", "OBJ-7", flat(gradient), whole, tolerance))
        found.append(at_most(f"{name}: J", "OBJ-7", abs(total - number(value)), tolerance))
    return found


def prompt_batches(subject: Subject, case: Case, rows: Callable[[Trace, int], Trace]) -> list[Finding]:
    """J of the batch is the mean of J of its prompts one by one, under uniform edge weights (OBJ-7)."""
    parts = []
    for i in range(len(case.trace.prompts)):
        advantages = tuple(level[i : i + 1] for level in case.advantages)
        kept = tuple(mask[i : i + 1] for mask in case.kept)
        own = Case(rows(case.trace, i), case.model, advantages, kept, case.options, case.reduction)
        parts.append(own.value(subject))
    whole, mean = case.value(subject), torch.stack(parts).mean()
    gradients = [flat(case.gradient(v)) for v in (whole, mean)]
    tolerance = PARITY * conditioning(case)
    name = f"{subject.name}, prompt by prompt"
    return [
        at_most(f"{name}: J", "OBJ-7", abs(number(whole) - number(mean)), tolerance),
        close(f"{name}: gradient", "OBJ-7", gradients[0], gradients[1], tolerance),
    ]


def zero_advantages_count(subject: Subject, case: Case) -> list[Finding]:
    """Edges with A = 0 stay in E: zeroing all advantages but one edge's leaves that edge's weight (OBJ-3).

    On policy, J = Σ_e weight_e·w_e·A_e exactly as counted over E.
    """
    trace = case.trace
    masks = trained_masks(trace.plan, case.kept)
    weights, factors = (
        edge_coefficients(masks, case.options.reduction),
        step_factors(masks, trace, case.options.edge_weights),
    )
    trees, conditions = len(trace.prompts) * trace.plan.roots, []
    worst = 0.0
    for step, factor in factors.items():
        edge = int(masks[step].flatten().to(torch.int64).argmax())
        value = number(case.value(subject, one_edge(case, step, edge)))
        expected = float(weights[step].flatten()[edge]) * factor / trees
        worst = max(worst, abs(value / expected - 1.0))
        conditions.append(value > 0.0)
    name = f"{subject.name}, objective: edges with A = 0 count"
    return [
        holds(f"{name}, and one edge's J is positive", "OBJ-3", conditions),
        at_most(name, "OBJ-3 OBJ-4", worst, PARITY * conditioning(case), len(conditions)),
    ]
