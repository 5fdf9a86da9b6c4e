"""What an implementation is asked to do: a method with its rewards, prompts, model and numbers."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from branchgrpo.conformance.subjects import Network, condition_for
from branchgrpo.reference.method import Method
from branchgrpo.reference.protocols import Condition, Prompt, RewardModel


@dataclass(frozen=True, eq=False)
class Backbone:
    """A velocity model with the prompts that it is asked for and their condition, one item a prompt."""

    model: torch.nn.Module
    prompts: tuple[Prompt, ...]
    condition: Condition


@dataclass(frozen=True)
class Case:
    """What an implementation is asked to do.

    Attributes:
        method: sampler, reduction and options.
        rewards, weights: reward models and their weights.
        prompts: number of prompts.
        latent: shape of a state.
        dtype, storage: of the arithmetic and of stored states.
        iteration, seed: of the keyed noise, windows and subsets.
        training: also drive the objective: ratios and coefficients.
        backbone: a velocity of somebody's run instead of the small network, with its prompts; no KL then.
    """

    method: Method
    rewards: tuple[RewardModel, ...]
    weights: tuple[float, ...] = (1.0,)
    prompts: int = 2
    latent: tuple[int, ...] = (4, 6)
    dtype: torch.dtype = torch.float64
    storage: torch.dtype = torch.float64
    iteration: int = 0
    seed: int = 7
    training: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backbone: Backbone | None = None

    @property
    def prompt_list(self) -> tuple[Prompt, ...]:
        """The backbone's prompts, or prompts with the ids 1, 2 and so on."""
        if self.backbone is not None:
            return tuple(self.backbone.prompts)
        return tuple(Prompt(i + 1, f"prompt {i + 1}") for i in range(self.prompts))

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of a rollout."""
        return {
            "latent_shape": self.latent,
            "dtype": self.dtype,
            "storage_dtype": self.storage,
            "reduction": self.method.log_prob,
            "iteration": self.iteration,
        }


def conditions(case: Case) -> Condition:
    """One condition a prompt of the case."""
    if case.backbone is not None:
        return case.backbone.condition
    return condition_for(case.prompt_list, case.dtype, case.device)


def policy(case: Case) -> Any:
    """v_θ of a case: a ``VelocityModel`` that is a module."""
    if case.backbone is not None:
        return case.backbone.model.to(case.device)
    return Network(math.prod(case.latent), dtype=case.dtype).to(case.device)


def reference_model(case: Case) -> Network:
    """The frozen policy of a case with KL."""
    return Network(math.prod(case.latent), scale=0.6, dtype=case.dtype).to(case.device)
