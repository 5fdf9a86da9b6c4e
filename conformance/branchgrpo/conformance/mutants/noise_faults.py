"""Mutants of branch noise and of the keys that it is drawn with."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from branchgrpo.conformance.mutants.base import mutant
from branchgrpo.conformance.mutants.plain import PlainImplementation
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import (
    NoiseKeys,
    NoiseRole,
    Prompt,
)


@mutant("NOISE-2", published="B1")
class ScaledBranchNoise(PlainImplementation):
    """Branch noise s·η without a shared part; the log-probability has the unscaled std."""

    def branch_noise(self, shared: Tensor, private: Tensor, spread: float) -> Tensor:
        return private * (4.0 if math.isinf(spread) else 4.0 * spread)


@mutant("NOISE-2")
class SpreadFormulaTakenLiterally(PlainImplementation):
    """(ξ₀ + s η)/√(1 + s²) evaluated as written: NaN at ∞, 0 at huge s."""

    def branch_noise(self, shared: Tensor, private: Tensor, spread: float) -> Tensor:
        if math.isinf(spread):
            return private
        square = torch.tensor(spread).double().square()
        return ((shared.unsqueeze(1) + spread * private) / torch.sqrt(1 + square)).to(private.dtype)


@mutant("NOISE-1")
class SharedNoiseRedrawnForEverySibling(PlainImplementation):
    """ξ₀ rolled from child to child: siblings are independent."""

    def branch_noise(self, shared: Tensor, private: Tensor, spread: float) -> Tensor:
        if math.isinf(spread):
            return private
        own = torch.stack([shared.flip(-1).roll(b, -1) for b in range(private.shape[1])], dim=1)
        return (own + spread * private) / math.hypot(1.0, spread)


@mutant("NOISE-1", published="F-same-seed")
class SiblingsFromOneSeed(PlainImplementation):
    """All siblings get the first one's draw."""

    def branch_noise(self, shared: Tensor, private: Tensor, spread: float) -> Tensor:
        return super().branch_noise(shared, private[:, :1].expand_as(private), spread)


class EditedKeys(PlainImplementation):
    """Draws keyed by something else than the node."""

    def edit(self, keys: NoiseKeys) -> NoiseKeys:
        """The keys that are really used."""
        return keys

    def keys(self, plan: Plan, prompts: Sequence[Prompt], role: NoiseRole, depth: int, iteration: int) -> NoiseKeys:
        return self.edit(super().keys(plan, prompts, role, depth, iteration))


@mutant("NOISE-3")
class SharedNoiseAcrossParents(EditedKeys):
    """One ξ₀ for all splitting parents of a step."""

    def edit(self, keys: NoiseKeys) -> NoiseKeys:
        shared = keys.role is NoiseRole.SHARED
        return replace(keys, nodes=torch.zeros_like(keys.nodes)) if shared else keys


@mutant("NOISE-3")
class TheSameNoiseAtEveryDepth(EditedKeys):
    """The depth is left out of the key."""

    def edit(self, keys: NoiseKeys) -> NoiseKeys:
        return replace(keys, depth=1)


@mutant("NOISE-3")
class NodesNumberedBackwards(EditedKeys):
    """Nodes of a level are keyed from the last to the first."""

    def keys(self, plan: Plan, prompts: Sequence[Prompt], role: NoiseRole, depth: int, iteration: int) -> NoiseKeys:
        keys = super().keys(plan, prompts, role, depth, iteration)
        return replace(keys, nodes=plan.level_sizes[depth] - 1 - keys.nodes)


@mutant("NOISE-4", published="F-prompt-noise")
class TheSameNoiseForEveryPrompt(EditedKeys):
    """The prompt is left out of the key."""

    def edit(self, keys: NoiseKeys) -> NoiseKeys:
        return replace(keys, prompts=torch.ones_like(keys.prompts))


@mutant("NOISE-4")
class NoiseKeyedByThePlaceInTheBatch(PlainImplementation):
    """The key holds a prompt's place instead of its id: order and batch change the numbers."""

    def keys(self, plan: Plan, prompts: Sequence[Prompt], role: NoiseRole, depth: int, iteration: int) -> NoiseKeys:
        placed = [replace(prompt, id=place) for place, prompt in enumerate(prompts)]
        return super().keys(plan, placed, role, depth, iteration)
