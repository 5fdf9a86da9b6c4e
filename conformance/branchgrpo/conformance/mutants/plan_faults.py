"""Mutants of what a plan says: windows that move, members of families, granularities."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from branchgrpo.conformance.mutants.base import mutant
from branchgrpo.conformance.mutants.plain import PlainImplementation
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.implementation import Trace
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import (
    Condition,
    NoiseSource,
    Prompt,
    VelocityModel,
)
from branchgrpo.reference.types import ODE, Kernel, KernelKind


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
class EqualInputsAreCalledAgain(PlainImplementation):
    """Each member is rolled out by itself: the anchor and the children's first calls once for every (k, λ)."""

    def answering_once(self, model: VelocityModel) -> VelocityModel:
        return model


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


@mutant("SING-1")
class ContinuationsBetweenOtherLevels(PlainImplementation):
    """The levels after k + 1 are not those of the plan that is handed back."""

    def singular_rollout(
        self,
        family: PlanFamily,
        model: VelocityModel,
        prompts: Sequence[Prompt],
        condition: Condition,
        noise: NoiseSource,
        **options: Any,
    ) -> dict[tuple[int, int], Trace]:
        traces = super().singular_rollout(family, model, prompts, condition, noise, **options)
        return {member: replace(trace, plan=family.member(*member)) for member, trace in traces.items()}

    def family_member(self, family: PlanFamily, k: int, granularity: int) -> Plan:
        plan = super().family_member(family, k, granularity)
        first = k + 2
        later = tuple(sigma**1.1 for sigma in plan.sigmas[first:])
        return replace(plan, sigmas=(*plan.sigmas[:first], *later))


@mutant("GRAN-6")
class AnotherScheduleForFamilies(PlainImplementation):
    """Members are rolled out at levels of their own."""

    def family_member(self, family: PlanFamily, k: int, granularity: int) -> Plan:
        plan = super().family_member(family, k, granularity)
        return replace(plan, sigmas=tuple(sigma**1.01 for sigma in plan.sigmas))
