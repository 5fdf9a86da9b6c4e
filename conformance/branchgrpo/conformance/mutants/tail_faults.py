"""Mutants of fusion and normalization."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from branchgrpo.conformance.mutants.base import mutant
from branchgrpo.conformance.mutants.plain import PlainImplementation
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.implementation import Levels, Trace
from branchgrpo.reference.options import Fusion, Normalization
from branchgrpo.reference.plan import Plan


@mutant("FUSE-1")
class LeavesLoseTheirReward(PlainImplementation):
    """The last level holds the mean of siblings."""

    def fuse(self, trace: Trace, rewards: Tensor, options: Fusion) -> Levels:
        values = super().fuse(trace, rewards, options)
        return (*values[:-1], values[-1] + 1e-3)


@mutant("FUSE-2")
class LastEdgeLeftOutOfThePath(PlainImplementation):
    """The deepest edges with a log-probability do not count."""

    def path_scores(self, trace: Trace, depth: int) -> Tensor:
        last = max(i for i, level in enumerate(trace.log_probs) if level is not None)
        cut = tuple(None if i == last else level for i, level in enumerate(trace.log_probs))
        return super().path_scores(replace(trace, log_probs=cut), depth)


@mutant("FUSE-2")
class ValuesWeightedByTheWrongLeaf(PlainImplementation):
    """Weights meet the rewards in reverse order."""

    def weights(self, trace: Trace, depth: int, options: Fusion) -> Tensor:
        found = super().weights(trace, depth, options)
        return found.flip(-1) if options.kind == "path_softmax" else found


@mutant("FUSE-3")
class BetaAppliedTwice(PlainImplementation):
    """exp(β² log p)."""

    def weights(self, trace: Trace, depth: int, options: Fusion) -> Tensor:
        squared = replace(options, beta=options.beta**2)
        return super().weights(trace, depth, squared if options.kind == "path_softmax" else options)


@mutant("FUSE-4", published="B14")
class SiblingsAddedUp(PlainImplementation):
    """Each child counts fully: r₁ + r₂ instead of a weighted mean."""

    def sibling_softmax(self, scores: Tensor) -> Tensor:
        return torch.ones_like(scores)


@mutant("FUSE-5")
class StandardisedByBessel(PlainImplementation):
    """The sample std in place of the population's."""

    def standard(self, scores: Tensor) -> Tensor:
        if scores.shape[-1] < 2:
            return torch.zeros_like(scores)
        spread = scores.std(dim=-1, keepdim=True)
        return torch.where(spread > 0, (scores - scores.mean(dim=-1, keepdim=True)) / spread, 0.0)


@mutant("FUSE-6")
class BetaOfAtLeastOneTenth(PlainImplementation):
    """β = 0 is taken for missing."""

    def weights(self, trace: Trace, depth: int, options: Fusion) -> Tensor:
        return super().weights(trace, depth, replace(options, beta=options.beta or 0.1))


@mutant("NORM-1")
class AdvantagesOfTheLeavesAtEveryDepth(PlainImplementation):
    """Inner nodes are centred by the leaves' mean."""

    def normalize(self, plan: Plan, values: Levels, weights: Sequence[float], options: Normalization) -> Levels:
        found = super().normalize(plan, values, weights, options)
        shifted = [
            level + 0.1 * (v[..., 0] - values[-1][..., 0].mean()) for level, v in zip(found, values, strict=True)
        ]
        return (*shifted[:-1], found[-1])


@mutant("NORM-1")
class AdvantagesInFloat32(PlainImplementation):
    """Advantages pass through float32 on their way."""

    def z_scores(self, plan: Plan, level: Tensor, options: Normalization) -> Tensor:
        return super().z_scores(plan, level, options).float().double()


@mutant("NORM-2")
class BatchStdOfThePromptAlone(PlainImplementation):
    """The std scope `batch` ends at the prompt."""

    def groups(self, plan: Plan, level: Tensor, scope: str) -> list[Tensor]:
        return super().groups(plan, level, "prompt" if scope == "batch" else scope)


@mutant("NORM-2", published="F-rank-group")
class GroupSplitOverTwoRanks(PlainImplementation):
    """Each half of a group is normalised by itself."""

    def z_scores(self, plan: Plan, level: Tensor, options: Normalization) -> Tensor:
        half = level.shape[1] // plan.roots // 2
        if half < 2 or plan.roots > 1:
            return super().z_scores(plan, level, options)
        parts = [
            super(GroupSplitOverTwoRanks, self).z_scores(plan, part, options)
            for part in torch.split(level, half, dim=1)
        ]
        return torch.cat(parts, dim=1)


@mutant("NORM-2")
class PromptsPooled(PlainImplementation):
    """Every scope is the batch."""

    def groups(self, plan: Plan, level: Tensor, scope: str) -> list[Tensor]:
        return super().groups(plan, level, "batch")


@mutant("NORM-3")
class PopulationForBessel(PlainImplementation):
    """n in the denominator, whatever is asked for."""

    def group_std(self, values: Tensor, options: Normalization) -> float:
        return super().group_std(values, replace(options, bessel=False))


@mutant("NORM-3")
class StdAboutTheMeanScopesMean(PlainImplementation):
    """Deviations of the std scope's values from the mean that is subtracted."""

    def z_scores(self, plan: Plan, level: Tensor, options: Normalization) -> Tensor:
        found = super().z_scores(plan, level, options).reshape(-1, level.shape[1] // plan.roots)
        means, stds = self.groups(plan, level, options.mean_scope), self.groups(plan, level, options.std_scope)
        rows = []
        for row, mean, std in zip(found, means, stds, strict=True):
            if self.is_equal(mean) or self.is_equal(std):
                rows.append(row)
                continue
            square = (std - mean.mean()).square().sum() / (len(std) - int(options.bessel))
            rows.append(row * (self.group_std(std, options) + options.eps) / (square.sqrt() + options.eps))
        return torch.stack(rows).reshape(level.shape)


@mutant("NORM-4", published="F-near-equal")
class NearEqualRewardsBlownUp(PlainImplementation):
    """Equal values are divided by their rounding."""

    def is_equal(self, values: Tensor) -> bool:
        return len(values) < 2

    def group_std(self, values: Tensor, options: Normalization) -> float:
        return max(super().group_std(values, options), 1e-17) - options.eps

    def z_scores(self, plan: Plan, level: Tensor, options: Normalization) -> Tensor:
        jitter = 1e-15 * torch.arange(level.shape[1], dtype=torch.float64)
        return super().z_scores(plan, level + jitter, options)


@mutant("NORM-5")
class RewardsAlwaysSummedFirst(PlainImplementation):
    """The order of normalising and summing is ignored."""

    def combined(self, plan: Plan, level: Tensor, weights: Sequence[float], options: Normalization) -> Tensor:
        return super().combined(plan, level, weights, replace(options, order="sum_then_normalize"))


@mutant("NORM-6")
class ClippedBeforeTheSum(PlainImplementation):
    """Each reward model's advantage is clipped, the sum is not."""

    def z_scores(self, plan: Plan, level: Tensor, options: Normalization) -> Tensor:
        return super().z_scores(plan, level, options).clamp(-options.clip, options.clip)

    def clip(self, advantages: Tensor, options: Normalization) -> Tensor:
        return advantages


@mutant("NORM-7")
class EpsilonAddedToTheVariance(PlainImplementation):
    """√(var + 1e-4): the scale of rewards matters."""

    def group_std(self, values: Tensor, options: Normalization) -> float:
        return math.sqrt(super().group_std(values, options) ** 2 + 1e-4)


@mutant("OBJ-3", published="B4")
class AdvantagesLeftUnset(PlainImplementation):
    """Advantages stay 0."""

    def normalize(self, plan: Plan, values: Levels, weights: Sequence[float], options: Normalization) -> Levels:
        return tuple(torch.zeros_like(level) for level in super().normalize(plan, values, weights, options))

    def granular_advantages(
        self, family: PlanFamily, k: int, values: Mapping[int, Levels], weights: Sequence[float], options: Normalization
    ) -> Tensor:
        return torch.zeros_like(super().granular_advantages(family, k, values, weights, options))


@mutant("GRAN-4", published="G2")
class MeanOverGranularities(PlainImplementation):
    """The mean over Λ where the sum is declared."""

    def granular_advantages(
        self, family: PlanFamily, k: int, values: Mapping[int, Levels], weights: Sequence[float], options: Normalization
    ) -> Tensor:
        return super().granular_advantages(family, k, values, weights, options) / len(family.granularities)


@mutant("GRAN-5")
class GranularitiesClippedOneByOne(PlainImplementation):
    """Each granularity is clipped before the sum."""

    def granular_advantages(
        self, family: PlanFamily, k: int, values: Mapping[int, Levels], weights: Sequence[float], options: Normalization
    ) -> Tensor:
        parts = [self.combined(family.member(k, g), values[g][k + 1], weights, options) for g in family.granularities]
        return torch.stack([self.clip(part, options) for part in parts]).sum(dim=0)


@mutant("PLAN-9")
class ChainsShareTheGroupsValue(PlainImplementation):
    """Below a split at step 0 values are pulled towards the group's mean."""

    def fuse(self, trace: Trace, rewards: Tensor, options: Fusion) -> Levels:
        values = super().fuse(trace, rewards, options)
        if trace.plan.splits != (0,):
            return values
        pulled = [0.9 * v + 0.1 * v.mean(dim=1, keepdim=True) for v in values[1:-1]]
        return (values[0], *pulled, values[-1])


@mutant("ERR-4")
class BrokenRewardsAccepted(PlainImplementation):
    """Non-finite rewards become 0."""

    def fuse(self, trace: Trace, rewards: Tensor, options: Fusion) -> Levels:
        return super().fuse(trace, torch.nan_to_num(rewards, 0.0, 0.0, 0.0), options)
