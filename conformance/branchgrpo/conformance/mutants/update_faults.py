"""Mutants of the objective."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from branchgrpo.conformance.mutants.base import mutant
from branchgrpo.conformance.mutants.plain import Edges, PlainImplementation, Scalar, Step
from branchgrpo.reference.implementation import Levels, Masks, Trace
from branchgrpo.reference.options import Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, VelocityModel
from branchgrpo.reference.types import Reduction


@mutant("OBJ-1")
class RatioUpsideDown(PlainImplementation):
    """ρ = p_old/p_θ."""

    def ratio(self, new: Edges, old: Edges) -> Edges:
        return super().ratio(old, new)


@mutant("OBJ-1")
class OldLogProbRecomputedEveryEpoch(PlainImplementation):
    """log p_old is that of the current weights."""

    def ratio(self, new: Edges, old: Edges) -> Edges:
        return super().ratio(new, new.detach())


@mutant("OBJ-2")
class NoClip(PlainImplementation):
    """ρ A."""

    def surrogate(self, rho: Edges, advantages: Edges, options: Objective) -> Edges:
        return rho * advantages


@mutant("OBJ-2")
class MaximumForMinimum(PlainImplementation):
    """The optimistic bound."""

    def surrogate(self, rho: Edges, advantages: Edges, options: Objective) -> Edges:
        clipped = rho.clamp(1 - options.clip_low, 1 + options.clip_high)
        return torch.maximum(rho * advantages, clipped * advantages)


@mutant("OBJ-2")
class OneClipForBothSides(PlainImplementation):
    """ε_hi is ignored."""

    def surrogate(self, rho: Edges, advantages: Edges, options: Objective) -> Edges:
        clipped = rho.clamp(1 - options.clip_low, 1 + options.clip_low)
        return torch.minimum(rho * advantages, clipped * advantages)


@mutant("OBJ-2")
class MinimisedInPlaceOfMaximised(PlainImplementation):
    """The sign of J is turned."""

    def combine(self, values: list[Scalar]) -> Scalar:
        return -super().combine(values)


@mutant("OBJ-3")
class EdgesWithoutAdvantageLeftOut(PlainImplementation):
    """Edges with A = 0 do not count in the mean."""

    def tree_steps(self, trace: Trace, advantages: Levels, kept: Masks, prompt: int, root: int) -> list[Step]:
        signed = tuple(mask & (level != 0) for mask, level in zip(kept, advantages[1:], strict=True))
        try:
            return super().tree_steps(trace, advantages, signed, prompt, root)
        except ValueError:
            return super().tree_steps(trace, advantages, kept, prompt, root)


@mutant("OBJ-4", published="B10")
class DividedByTheWholeTree(PlainImplementation):
    """The sum over kept edges is divided by all edges of the tree."""

    def reduce(self, terms: list[Tensor], options: Objective, edges: int) -> Scalar:
        return torch.cat(terms).sum() / edges


@mutant("OBJ-4")
class DepthMeanIgnored(PlainImplementation):
    """Always the mean over edges."""

    def reduce(self, terms: list[Tensor], options: Objective, edges: int) -> Scalar:
        return torch.cat(terms).mean()


@mutant("OBJ-4")
class DetachedGradient(PlainImplementation):
    """The means of the first trained step carry no gradient."""

    def training_mean(self, trace: Trace, step: int, x: Tensor, model: VelocityModel, condition: Condition) -> Tensor:
        mean = super().training_mean(trace, step, x, model, condition)
        return mean.detach() if step == trace.plan.trainable_steps[0] and len(trace.plan.trainable_steps) > 1 else mean


@mutant("OBJ-5")
class KlWithoutDelta(PlainImplementation):
    """The KL's variance lacks Δ."""

    def kl(self, mean: Tensor, frozen: Tensor, std: float, delta: float, reduction: Reduction) -> Edges:
        return super().kl(mean, frozen, std, delta, reduction) * delta


@mutant("OBJ-5")
class KlWithoutAGradient(PlainImplementation):
    """The KL is computed under no_grad."""

    def kl(self, mean: Tensor, frozen: Tensor, std: float, delta: float, reduction: Reduction) -> Edges:
        return super().kl(mean.detach(), frozen, std, delta, reduction)


@mutant("OBJ-5")
class KlThatTrainsTheReference(PlainImplementation):
    """Gradients flow into the frozen policy."""

    def frozen_mean(self, trace: Trace, step: int, x: Tensor, model: VelocityModel, condition: Condition) -> Tensor:
        return self.training_mean(trace, step, x, model, condition)


@mutant("OBJ-6")
class WeightsNormalisedOverEdges(PlainImplementation):
    """The mean std is taken over edges in place of distinct steps."""

    def step_weights(
        self, found: Sequence[tuple[Trace, list[Step]]], options: Objective
    ) -> dict[tuple[float, float], float]:
        weights = super().step_weights(found, options)
        if options.edge_weights == "uniform":
            return weights
        stds = [float(t.stds[s.step]) for t, steps in found for s in steps for _ in s.children]
        return {key: key[1] / (sum(stds) / len(stds)) for key in weights}


@mutant("OBJ-7")
class TreesWeighedByTheirEdges(PlainImplementation):
    """One mean over the edges of all trees."""

    def trees(
        self, traces: Sequence[Trace], advantages: Sequence[Levels], kept: Sequence[Masks]
    ) -> Iterator[tuple[Trace, int, list[Step]]]:
        self.sizes = [sum(len(s.children) for s in steps) for _, _, steps in super().trees(traces, advantages, kept)]
        return super().trees(traces, advantages, kept)

    def combine(self, values: list[Scalar]) -> Scalar:
        sizes = torch.tensor(self.sizes, dtype=torch.float64)
        return (torch.stack(values) * sizes).sum() / sizes.sum()


@mutant("OBJ-8")
class ConditionsRepeatedToFit(PlainImplementation):
    """Too few conditions are repeated without a word."""

    def objective(
        self,
        traces: Sequence[Trace],
        model: VelocityModel,
        condition: Condition,
        advantages: Sequence[Levels],
        kept: Sequence[Masks],
        options: Objective,
        reduction: Reduction,
        reference_model: VelocityModel | None,
    ) -> Scalar:
        fit = condition.gather(torch.arange(len(traces[0].prompts)) % len(condition))
        return super().objective(traces, model, fit, advantages, kept, options, reduction, reference_model)


@mutant("SING-6")
class OneKTrainedMoreThanTheOthers(PlainImplementation):
    """The first tree counts twice."""

    def combine(self, values: list[Scalar]) -> Scalar:
        return super().combine([*values, values[0]]) if len(values) > 4 else super().combine(values)


@mutant("PRUNE-6")
class PrunedEdgesLeakAGradient(PlainImplementation):
    """A tenth of what pruning dropped stays in the sum."""

    def objective(
        self,
        traces: Sequence[Trace],
        model: VelocityModel,
        condition: Condition,
        advantages: Sequence[Levels],
        kept: Sequence[Masks],
        options: Objective,
        reduction: Reduction,
        reference_model: VelocityModel | None,
    ) -> Scalar:
        whole = [tuple(torch.ones_like(mask) for mask in masks) for masks in kept]
        rest = (traces, model, condition, advantages)
        pruned = super().objective(*rest, kept, options, reduction, reference_model)
        if options.clip_high > 0.5:
            return pruned
        return 0.9 * pruned + 0.1 * super().objective(*rest, whole, options, reduction, reference_model)


@mutant("PLAN-6", published="B9")
class UntrainedStepsTrained(PlainImplementation):
    """Every stochastic step is trained, whatever the plan's trained steps are."""

    def trains(self, plan: Plan, step: int) -> bool:
        return step in plan.stochastic_steps


@mutant("ERR-2")
class AnEmptySetTrainsNothing(PlainImplementation):
    """Nothing left to train gives 0 without a word."""

    def tree_steps(self, trace: Trace, advantages: Levels, kept: Masks, prompt: int, root: int) -> list[Step]:
        try:
            return super().tree_steps(trace, advantages, kept, prompt, root)
        except ValueError:
            everything = tuple(torch.ones_like(mask) for mask in kept)
            zeros = tuple(torch.zeros_like(level) for level in advantages)
            return super().tree_steps(trace, zeros, everything, prompt, root)


@mutant("ERR-5")
class AFrozenPolicyWithoutUse(PlainImplementation):
    """A frozen policy without a KL is ignored."""

    def objective(
        self,
        traces: Sequence[Trace],
        model: VelocityModel,
        condition: Condition,
        advantages: Sequence[Levels],
        kept: Sequence[Masks],
        options: Objective,
        reduction: Reduction,
        reference_model: VelocityModel | None,
    ) -> Scalar:
        frozen = reference_model if options.kl > 0 else None
        return super().objective(traces, model, condition, advantages, kept, options, reduction, frozen)
