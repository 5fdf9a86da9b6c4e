"""What is being checked: an implementation on a device, with the calls that every check makes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.implementation import Implementation, Levels, Masks, Trace
from branchgrpo.reference.options import Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseSource, Prompt, TensorCondition, VelocityModel
from branchgrpo.reference.types import Reduction

CPU = torch.device("cpu")


def numbered_prompts(count: int, first: int = 0) -> tuple[Prompt, ...]:
    """``count`` prompts with consecutive ids from ``first``."""
    return tuple(Prompt(first + i, f"prompt {first + i}") for i in range(count))


def offsets(prompts: Sequence[Prompt], device: torch.device = CPU) -> TensorCondition:
    """A condition whose ``offset`` is a function of the prompt's id, so that mixing prompts up shows."""
    values = torch.tensor([0.1 * ((7 * p.id) % 11) - 0.5 for p in prompts], dtype=torch.float64, device=device)
    return TensorCondition({"offset": values.unsqueeze(1)})


@dataclass(frozen=True)
class Draws:
    """How states are drawn and kept.

    Attributes:
        latent_shape: shape of one state.
        dtype, storage_dtype: of the arithmetic and of the states.
        reduction: of log-probabilities.
        iteration: part of every noise key.
    """

    latent_shape: tuple[int, ...] = (3,)
    dtype: torch.dtype = torch.float64
    storage_dtype: torch.dtype = torch.float64
    reduction: Reduction = Reduction.MEAN
    iteration: int = 0


@dataclass(frozen=True)
class Subject:
    """An implementation on a device.

    Attributes:
        implementation: what is checked.
        device: where its models and states live.
    """

    implementation: Implementation
    device: torch.device = CPU

    @property
    def name(self) -> str:
        """Short name for the table."""
        return self.implementation.name.removeprefix("branchgrpo.")

    def grow(
        self,
        plan: Plan,
        model: VelocityModel,
        noise: NoiseSource,
        prompts: Sequence[Prompt],
        draws: Draws | None = None,
    ) -> Trace:
        """Roll a plan out."""
        how = draws or Draws()
        return self.implementation.rollout(
            plan,
            model,
            prompts,
            offsets(prompts, self.device),
            noise,
            latent_shape=how.latent_shape,
            dtype=how.dtype,
            storage_dtype=how.storage_dtype,
            reduction=how.reduction,
            iteration=how.iteration,
        )

    def grow_family(
        self,
        family: PlanFamily,
        model: VelocityModel,
        noise: NoiseSource,
        prompts: Sequence[Prompt],
        draws: Draws | None = None,
    ) -> dict[tuple[int, int], Trace]:
        """Roll every member of a family out."""
        how = draws or Draws()
        return self.implementation.singular_rollout(
            family,
            model,
            prompts,
            offsets(prompts, self.device),
            noise,
            latent_shape=how.latent_shape,
            dtype=how.dtype,
            storage_dtype=how.storage_dtype,
            reduction=how.reduction,
            iteration=how.iteration,
        )

    def objective(
        self,
        trace: Trace,
        model: VelocityModel,
        advantages: Levels,
        kept: Masks,
        options: Objective | None = None,
        reduction: Reduction = Reduction.MEAN,
        reference_model: VelocityModel | None = None,
    ) -> Float64[Tensor, ""]:
        """J of one trace."""
        condition = offsets(trace.prompts, self.device)
        how = options or Objective()
        return self.implementation.objective(
            [trace], model, condition, [advantages], [kept], how, reduction, reference_model
        )


def all_kept(plan: Plan, prompts: int) -> Masks:
    """Masks that drop nothing."""
    return tuple(torch.ones(prompts, plan.roots * n, dtype=torch.bool) for n in plan.level_sizes[1:])


def synthetic_trace(plan: Plan, prompts: Sequence[Prompt], log_probs: Sequence[Tensor | None]) -> Trace:
    """A trace with given log-probabilities and states 0, for operations that read nothing else."""
    widths = [plan.roots * n for n in plan.level_sizes]
    states = tuple(torch.zeros(len(prompts), n, 1, dtype=torch.float64) for n in widths)
    stds = torch.ones(plan.steps, dtype=torch.float64)
    return Trace(plan, tuple(prompts), states, states[1:], stds, tuple(log_probs))
