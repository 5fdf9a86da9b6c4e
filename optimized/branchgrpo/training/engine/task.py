"""What is trained: a network, its prompts and conditions, what decodes its samples, and what rewards them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.protocols import Condition, Prompt
from branchgrpo.rewards.reward_set import RewardSet
from branchgrpo.rewards.scoring import Decode
from branchgrpo.training.config.schema import TrainConfig
from branchgrpo.training.engine.distributed import Cluster

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, eq=False)
class Task:
    """Everything about a run that does not depend on the method.

    Attributes:
        network: the policy, an ``nn.Module`` and a ``VelocityModel``, on the device, in evaluation mode.
        latent_shape: of one state.
        condition: conditions of some prompts, on the device.
        prepare: makes the conditions of all prompts that the run will need, once, before training.
        decode: from latent samples to what the rewards take; None where they take latents.
        rewards: those that train, or are logged with weight 0.
        held_out: those of evaluations only; None without any.
        device: of the arithmetic.
        lora: an adapter is trained.
        autocast: precision of the arithmetic where it is below that of the weights.
        experts: networks among which σ chooses.
        unused: some weights may be left without a gradient by a step.
    """

    network: nn.Module
    latent_shape: tuple[int, ...]
    condition: Callable[[Sequence[Prompt]], Condition]
    prepare: Callable[[Sequence[Prompt]], None]
    decode: Decode | None
    rewards: RewardSet
    held_out: RewardSet | None
    device: torch.device
    lora: bool
    autocast: torch.dtype | None
    experts: int
    unused: bool


def check_dtype(config: TrainConfig) -> None:
    """Raise ``OptionError`` for a precision in which gradients would vanish."""
    if config.model.dtype == "float16":
        legal = "float64, float32 or bfloat16: there is no loss scaling, without which float16 gradients vanish"
        raise OptionError("model.dtype", "float16", legal)


def build_task(config: TrainConfig, cluster: Cluster) -> Task:
    """The task of ``model.source``: the digits, or the pipeline of a folder or hub id.

    Raises:
        OptionError, InputError: an option that the source cannot follow, a wrong folder, unknown rewards.
    """
    check_dtype(config)
    if config.model.source == "digits":
        from branchgrpo.training.engine.digits_task import digits_task

        return digits_task(config, cluster)
    from branchgrpo.training.engine.pipeline_task import pipeline_task

    return pipeline_task(config, cluster)
