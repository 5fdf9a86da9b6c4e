"""Mutants of kernels, noise, log-probability and rollout."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from branchgrpo.conformance.mutants.base import mutant
from branchgrpo.conformance.mutants.plain import PlainImplementation
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.implementation import Trace
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import (
    Condition,
    Guidance,
    NoiseKeys,
    NoiseRole,
    NoiseSource,
    Prompt,
    VelocityModel,
)
from branchgrpo.reference.types import ODE, Kernel, KernelKind, Reduction


@mutant("KERN-2")
class NoiseAtDeterministicSteps(PlainImplementation):
    """A little noise at steps whose std is 0."""

    def store(self, state: Tensor, dtype: torch.dtype) -> Tensor:
        return super().store(state * (1 + 1e-3), dtype)


@mutant("KERN-2")
class EulerStepWithoutDelta(PlainImplementation):
    """x − σ v at every ODE step."""

    def transition(self, plan: Plan, step: int, x: Tensor, velocity: Tensor) -> tuple[Tensor, float]:
        mean, std = super().transition(plan, step, x, velocity)
        ode = plan.effective_kernels[step].kind is KernelKind.ODE
        return (x - plan.sigmas[step] * velocity if ode else mean), std


@mutant("KERN-3")
class DriftWithTheWrongSign(PlainImplementation):
    """The score pushes away from the data."""

    def drift(self, g: float, sigma: float, delta: float) -> float:
        return -super().drift(g, sigma, delta)


@mutant("KERN-3")
class DriftWithoutAHalf(PlainImplementation):
    """g²Δ/σ instead of g²Δ/(2σ)."""

    def drift(self, g: float, sigma: float, delta: float) -> float:
        return 2 * super().drift(g, sigma, delta)


@mutant("KERN-4")
class CpsSineAndCosineSwapped(PlainImplementation):
    """The kept noise is scaled by the sine."""

    def transition(self, plan: Plan, step: int, x: Tensor, velocity: Tensor) -> tuple[Tensor, float]:
        kernel, sigma, after = plan.effective_kernels[step], plan.sigmas[step], plan.sigmas[step + 1]
        if kernel.kind is not KernelKind.CPS:
            return super().transition(plan, step, x, velocity)
        kept = after * math.sin(kernel.eta * math.pi / 2)
        mean = (1 - after) * (x - sigma * velocity) + kept * (x + (1 - sigma) * velocity)
        return mean, self.std(plan, step)


@mutant("KERN-5")
class StdWithoutTheRootOfDelta(PlainImplementation):
    """std = g."""

    def std(self, plan: Plan, step: int) -> float:
        kernel = plan.effective_kernels[step]
        if kernel.kind in (KernelKind.ODE, KernelKind.CPS):
            return super().std(plan, step)
        return self.diffusion(kernel, plan.sigmas[step], plan.sigmas[1])


@mutant("KERN-5")
class SigmaIndexOffByOne(PlainImplementation):
    """g of the next level."""

    def std(self, plan: Plan, step: int) -> float:
        kernel = plan.effective_kernels[step]
        if kernel.kind is not KernelKind.FLOW_SDE or step == plan.steps - 1:
            return super().std(plan, step)
        g = self.diffusion(kernel, plan.sigmas[step + 1], plan.sigmas[1])
        return g * math.sqrt(plan.deltas[step])


@mutant("KERN-6")
class MeanDetachedFromTheVelocity(PlainImplementation):
    """No gradient through the mean."""

    def transition(self, plan: Plan, step: int, x: Tensor, velocity: Tensor) -> tuple[Tensor, float]:
        return super().transition(plan, step, x, velocity.detach())


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


@mutant("ROLL-1")
class InitialNoiseTooLarge(PlainImplementation):
    """Initial states with std √2 times too large."""

    def rollout(
        self,
        plan: Plan,
        model: VelocityModel,
        prompts: Sequence[Prompt],
        condition: Condition,
        noise: NoiseSource,
        **options: Any,
    ) -> Trace:
        return super().rollout(plan, model, prompts, condition, LoudRoots(noise), **options)


class LoudRoots:
    """A noise source whose root draws are too large."""

    def __init__(self, source: NoiseSource) -> None:
        self.source = source

    def draw(self, keys: NoiseKeys, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Draws, those of roots scaled."""
        factor = math.sqrt(2) if keys.role is NoiseRole.ROOT else 1.0
        return self.source.draw(keys, shape, dtype, device) * factor


@mutant("ROLL-2")
class GlobalRandomNumbers(PlainImplementation):
    """Private noise from torch's global generator."""

    def step_noise(
        self, plan: Plan, step: int, prompts: Sequence[Prompt], noise: NoiseSource, of: dict[str, Any]
    ) -> Tensor:
        drawn = super().step_noise(plan, step, prompts, noise, of)
        return torch.randn_like(drawn) if plan.branching[step] == 1 else drawn


@mutant("ROLL-3", published=None)
class TimestepTruncatedToAnInteger(PlainImplementation):
    """The model sees int(1000 σ)/1000."""

    def velocity(self, model: VelocityModel, x: Tensor, sigma: float, condition: Condition) -> Tensor:
        return super().velocity(model, x, int(1000 * sigma) / 1000, condition)


@mutant("ROLL-3")
class OneVelocityForTheWholeLevel(PlainImplementation):
    """The first parent's velocity serves its whole level."""

    def velocity(self, model: VelocityModel, x: Tensor, sigma: float, condition: Condition) -> Tensor:
        first = super().velocity(model, x[:1], sigma, condition.gather(torch.zeros(1, dtype=torch.int64)))
        return first.expand_as(x)


@mutant("ROLL-4")
class GuidanceForgottenInTraining(PlainImplementation):
    """The update evaluates the conditional branch alone."""

    def training_mean(self, trace: Trace, step: int, x: Tensor, model: VelocityModel, condition: Condition) -> Tensor:
        before = model.guidance
        model.guidance = Guidance("classifier_free", 1.0) if before.kind == "classifier_free" else before
        try:
            return super().training_mean(trace, step, x, model, condition)
        finally:
            model.guidance = before


@mutant("ROLL-5")
class StatesKeptInFloat32(PlainImplementation):
    """The storage dtype is ignored."""

    def store(self, state: Tensor, dtype: torch.dtype) -> Tensor:
        return state.float()


@mutant("ROLL-3")
class StatesRoundedByABatchingLayer(PlainImplementation):
    """Some layer rounds to bf16, whatever the storage dtype is."""

    def velocity(self, model: VelocityModel, x: Tensor, sigma: float, condition: Condition) -> Tensor:
        return super().velocity(model, x.bfloat16().to(x.dtype), sigma, condition)


@mutant("ROLL-6")
class NoiseOnTheDenoisedLeaf(PlainImplementation):
    """Under ``denoised`` the leaf is the mean of the second last step's state once more."""

    def rollout(
        self,
        plan: Plan,
        model: VelocityModel,
        prompts: Sequence[Prompt],
        condition: Condition,
        noise: NoiseSource,
        **options: Any,
    ) -> Trace:
        trace = super().rollout(plan, model, prompts, condition, noise, **options)
        wrong = 0.5 * (
            trace.means[-1] + trace.states[-2].to(trace.means[-1].dtype).repeat_interleave(plan.branching[-1], dim=1)
        )
        if trace.log_probs[-1] is not None:
            return trace
        return replace(
            trace, states=(*trace.states[:-1], wrong.to(trace.states[-1].dtype)), means=(*trace.means[:-1], wrong)
        )


@mutant("LOGP-1", published="M4")
class LogProbWithoutConstants(PlainImplementation):
    """Only −z²/2."""

    def log_probability(self, child: Tensor, mean: Tensor, std: float, reduction: Reduction) -> Tensor:
        zero = super().log_probability(mean, mean, std, reduction)
        return super().log_probability(child, mean, std, reduction) - zero


@mutant("LOGP-2", published="F-reduction")
class SumInPlaceOfMean(PlainImplementation):
    """The reduction is always the sum."""

    def log_probability(self, child: Tensor, mean: Tensor, std: float, reduction: Reduction) -> Tensor:
        return super().log_probability(child, mean, std, Reduction.SUM)


@mutant("LOGP-3", published="B2")
class LogProbBeforeRounding(PlainImplementation):
    """The child is scored before it is rounded to the storage dtype."""

    def scored(self, made: Tensor, stored: Tensor) -> Tensor:
        return made


@mutant("LOGP-5")
class LogProbInFloat32(PlainImplementation):
    """Sums over elements in float32."""

    def log_probability(self, child: Tensor, mean: Tensor, std: float, reduction: Reduction) -> Tensor:
        z = (child.float() - mean.float()) / std
        terms = (-z * z / 2 - math.log(std) - math.log(2 * math.pi) / 2).flatten(1)
        return terms.sum(dim=1) if reduction is Reduction.SUM else terms.mean(dim=1)


@mutant("OBJ-1", published="F-train-batch")
class TrainingSeesAnotherState(PlainImplementation):
    """The update evaluates the model at states of another precision than the rollout."""

    def training_mean(self, trace: Trace, step: int, x: Tensor, model: VelocityModel, condition: Condition) -> Tensor:
        return super().training_mean(trace, step, (x * (1 + 2**-6)), model, condition)


@mutant("WIN-1", published="B7")
class EveryStepIsStochastic(PlainImplementation):
    """Outside the window the SDE goes on."""

    def plan(self, plan: Plan) -> Plan:
        noisy = [k for k in plan.kernels if k.kind is not KernelKind.ODE]
        kernels = tuple(noisy[0] if noisy and k.kind is KernelKind.ODE else k for k in plan.kernels)
        return replace(plan, kernels=kernels)


def moved(plan: Plan, steps: Sequence[int], kernel: Kernel) -> Plan:
    """A windowed plan with its window somewhere else."""
    kernels = tuple(kernel if i in steps or plan.branching[i] > 1 else ODE for i in range(plan.steps))
    return replace(plan, kernels=kernels)


@mutant("WIN-4", published="B7")
class WindowThatIgnoresTheIteration(PlainImplementation):
    """Beside splits, always the first steps are stochastic."""

    def plan(self, plan: Plan) -> Plan:
        noisy = [i for i in plan.stochastic_steps if plan.branching[i] == 1]
        whole = not any(k.kind is KernelKind.ODE for k in plan.kernels[:-1])
        if not noisy or whole or plan.spreads[0] == math.inf:
            return plan
        return moved(plan, range(2), plan.kernels[noisy[0]])


@mutant("WIN-2", published="M1")
class WindowCutAtTheEndOfTheRange(PlainImplementation):
    """The last window loses its last step."""

    def plan(self, plan: Plan) -> Plan:
        last = plan.steps - 2
        moving = (
            any(k.kind is KernelKind.ODE for k in plan.kernels[:-1]) and plan.kernels[last].kind is not KernelKind.ODE
        )
        if not moving or plan.branching[last] > 1:
            return plan
        return replace(plan, kernels=(*plan.kernels[:last], ODE, *plan.kernels[last + 1 :]))


@mutant("SING-2")
class NoiseAtTheNextStepToo(PlainImplementation):
    """Step k + 1 of a member is stochastic as well."""

    def family_member(self, family: PlanFamily, k: int, granularity: int) -> Plan:
        plan = super().family_member(family, k, granularity)
        if k + 2 >= plan.steps:
            return plan
        return replace(plan, kernels=(*plan.kernels[: k + 1], family.kernel, *plan.kernels[k + 2 :]))


@mutant("SING-3")
class ChildrenRedrawnForEveryGranularity(PlainImplementation):
    """Each member draws noise of its own."""

    def singular_rollout(
        self,
        family: PlanFamily,
        model: VelocityModel,
        prompts: Sequence[Prompt],
        condition: Condition,
        noise: NoiseSource,
        **options: Any,
    ) -> dict[tuple[int, int], Trace]:
        return {
            (k, g): self.rollout(
                family.member(k, g), model, prompts, condition, noise, **{**options, "iteration": 100 + g}
            )
            for k, g in family.members()
        }


@mutant("SING-4", published=None)
class TheAnchorIsCalledOnceMorePerChild(PlainImplementation):
    """x_k is called again for every child, as public code does."""

    def singular_rollout(
        self,
        family: PlanFamily,
        model: VelocityModel,
        prompts: Sequence[Prompt],
        condition: Condition,
        noise: NoiseSource,
        **options: Any,
    ) -> dict[tuple[int, int], Trace]:
        for _ in range(2):
            traces = super().singular_rollout(family, model, prompts, condition, noise, **options)
        return traces


@mutant("GRAN-1")
class ContinuationWithoutItsSecondStep(PlainImplementation):
    """The stride starts at k + 1: k + 2 is skipped."""

    def family_member(self, family: PlanFamily, k: int, granularity: int) -> Plan:
        plan = super().family_member(family, k, granularity)
        if granularity == 1 or plan.steps <= k + 3:
            return plan
        drop = k + 2
        return replace(
            plan,
            sigmas=(*plan.sigmas[:drop], *plan.sigmas[drop + 1 :]),
            kernels=(*plan.kernels[: drop - 1], *plan.kernels[drop:]),
            branching=(*plan.branching[: drop - 1], *plan.branching[drop:]),
            spreads=plan.spreads[1:],
        )


@mutant("GRAN-6")
class AnotherScheduleForFamilies(PlainImplementation):
    """Members are rolled out at levels of their own."""

    def family_member(self, family: PlanFamily, k: int, granularity: int) -> Plan:
        plan = super().family_member(family, k, granularity)
        return replace(plan, sigmas=tuple(sigma**1.01 for sigma in plan.sigmas))


@mutant("ERR-3")
class BrokenModelsAccepted(PlainImplementation):
    """The model's velocity is not looked at."""

    def velocity(self, model: VelocityModel, x: Tensor, sigma: float, condition: Condition) -> Tensor:
        v = model(x, torch.full((len(x),), sigma, dtype=x.dtype), condition)
        return torch.nan_to_num(v.to(x.dtype)).expand_as(x)
