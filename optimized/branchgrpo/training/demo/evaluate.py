"""Evaluation: the same noise for every method, run and moment, and the deterministic sampler."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.models.digits import LATENT_SHAPE
from branchgrpo.optimized.noise import KeyedNoise
from branchgrpo.optimized.rollout import rollout
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Prompt, RewardModel, VelocityModel
from branchgrpo.reference.types import ODE
from branchgrpo.training.demo.config import STEPS, DemoConfig
from branchgrpo.training.digits import digit_condition, digit_prompts


def evaluation_plan(samples: int) -> Plan:
    """Independent noises a prompt, every step an ODE step, on the schedule of training."""
    return tree_plan(STEPS, ODE, roots=samples)


class Judge(Protocol):
    """Somebody who reads samples and is part of no reward."""

    def accuracy(self, samples: Float[Tensor, "items *sample"], prompts: Sequence[Prompt]) -> float:
        """Share of the samples that are read as their prompt."""
        ...


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Mean reward, share of the samples that the judge reads as their prompt, and the samples, digits outermost."""

    reward: float
    judge: float
    samples: Float[Tensor, "digits samples 1 8 8"]


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Draws and judges ``config.samples`` samples a digit."""

    config: DemoConfig
    reward: RewardModel
    judge: Judge

    def __call__(self, model: VelocityModel) -> Evaluation:
        """Evaluate a model; its calls count in no budget."""
        prompts, plan = digit_prompts(), evaluation_plan(self.config.samples)
        noise = KeyedNoise(self.config.evaluation_seed)
        sampling = Sampling(noise, LATENT_SHAPE, torch.float32, torch.float32)
        leaves = rollout(plan, model, prompts, digit_condition(prompts), sampling).leaves
        flat = leaves.flatten(0, 1)
        named: list[Prompt] = [prompt for prompt in prompts for _ in range(self.config.samples)]
        return Evaluation(float(self.reward(flat, named).mean()), self.judge.accuracy(flat, named), leaves)
