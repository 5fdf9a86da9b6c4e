"""Mutants of kernels, rollout and log-probability."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from branchgrpo.conformance.mutants.base import mutant
from branchgrpo.conformance.mutants.plain import PlainImplementation
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
from branchgrpo.reference.types import KernelKind, Reduction


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


@mutant("ROLL-5")
class MeanRoundedBeforeTheNoise(PlainImplementation):
    """The mean is kept in the storage dtype, and so is its sum with the noise: two roundings."""

    def made(self, mean: Tensor, displacement: Tensor, dtype: torch.dtype) -> Tensor:
        return mean.to(dtype).to(mean.dtype) + displacement


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


@mutant("ERR-3")
class BrokenModelsAccepted(PlainImplementation):
    """The model's velocity is not looked at."""

    def velocity(self, model: VelocityModel, x: Tensor, sigma: float, condition: Condition) -> Tensor:
        v = model(x, torch.full((len(x),), sigma, dtype=x.dtype), condition)
        return torch.nan_to_num(v.to(x.dtype)).expand_as(x)
