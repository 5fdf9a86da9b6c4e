"""Mutants of pruning and of the training subsets."""

from collections.abc import Sequence

import torch
from torch import Tensor

from branchgrpo.conformance.mutants.base import mutant
from branchgrpo.conformance.mutants.plain import PlainImplementation
from branchgrpo.reference.implementation import Levels, Masks
from branchgrpo.reference.options import DepthWindow, Normalization, PruningRule
from branchgrpo.reference.plan import Plan


@mutant("PRUNE-1")
class PruningWithoutRules(PlainImplementation):
    """The last depth is dropped even where no rule is."""

    def prune(self, plan: Plan, keys: Tensor, rules: Sequence[PruningRule], iteration: int) -> Masks:
        masks = super().prune(plan, keys, rules, iteration)
        return masks if rules else (*masks[:-1], torch.zeros_like(masks[-1]))


@mutant("PRUNE-1")
class OnlyTheFirstRuleCounts(PlainImplementation):
    """Later rules are ignored."""

    def prune(self, plan: Plan, keys: Tensor, rules: Sequence[PruningRule], iteration: int) -> Masks:
        return super().prune(plan, keys, rules[:1], iteration)


@mutant("PRUNE-2")
class TiesToTheHigherIndex(PlainImplementation):
    """Among equal keys the last comes first."""

    def ranked(self, keys: Tensor) -> list[int]:
        return sorted(range(len(keys)), key=lambda leaf: (-float(keys[leaf]), -leaf))


@mutant("PRUNE-2")
class KeysAfterTheClip(PlainImplementation):
    """Leaves are ranked by clipped advantages."""

    def leaf_keys(self, plan: Plan, values: Levels, weights: Sequence[float], options: Normalization) -> Tensor:
        keys = super().leaf_keys(plan, values, weights, options)
        return keys if len(weights) == 1 else self.clip(keys, options)


@mutant("PRUNE-3", published="B6")
class TheFirstChildIsTheBest(PlainImplementation):
    """Parent-Top1 keeps the first child, whatever the rewards."""

    def best_child(self, keys: Tensor) -> int:
        return 0


@mutant("PRUNE-3")
class SplitEdgesDroppedUnasked(PlainImplementation):
    """Width pruning drops the split edges too."""

    def first_dropped(self, plan: Plan, drop_split_edges: bool) -> int:
        return super().first_dropped(plan, True)


@mutant("PRUNE-4", published="B6")
class OnlyTheBestAreExtreme(PlainImplementation):
    """Extreme-b keeps the 2b best."""

    def extremes(self, keys: Tensor, b: int) -> set[int]:
        return set(self.ranked(keys)[: 2 * b])


@mutant("PRUNE-5", published="B5")
class WindowMovesTheOtherWay(PlainImplementation):
    """Depth windows move towards the root."""

    def window(self, rule: DepthWindow, steps: int, iteration: int) -> range:
        moved = abs(super().window(rule, steps, iteration).start - rule.start)
        first = rule.start - rule.direction * moved
        return range(max(1, first), min(first + rule.size, steps + 1))


@mutant("PRUNE-5")
class WindowMovesAnIterationEarly(PlainImplementation):
    """Iterations are counted from 1."""

    def window(self, rule: DepthWindow, steps: int, iteration: int) -> range:
        return super().window(rule, steps, iteration + 1)


@mutant("PRUNE-5", published="B5")
class ChildDepthComparedWithTheStep(PlainImplementation):
    """The window is read as steps: it is one depth too deep."""

    def window(self, rule: DepthWindow, steps: int, iteration: int) -> range:
        found = super().window(rule, steps, iteration)
        return range(found.start + 1, min(found.stop + 1, steps + 1))


@mutant("PLAN-7", published="B9")
class TheFractionIsIgnored(PlainImplementation):
    """Every chain trains every step."""

    def trained_subsets(self, plan: Plan, prompts: Sequence[object], seed: int, iteration: int) -> Masks:
        return tuple(torch.ones(len(prompts), plan.roots * size, dtype=torch.bool) for size in plan.level_sizes[1:])


@mutant("PLAN-7")
class TheSameSubsetEveryIteration(PlainImplementation):
    """The iteration is left out of the key."""

    def subset(self, plan: Plan, seed: int, iteration: int, prompt: int, root: int, leaf: int) -> set[int]:
        return super().subset(plan, seed, 0, prompt, root, leaf)
