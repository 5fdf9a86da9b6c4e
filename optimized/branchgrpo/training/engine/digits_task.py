"""The digits as a training task: the demo's generator, its reward, and its judge as a held-out reward."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.models.digits import LATENT_SHAPE, DigitsConfig, DigitsVelocity
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.protocols import Guidance, Prompt, RewardModel, TensorCondition
from branchgrpo.rewards.digits import DigitsReward, DigitsRewardConfig
from branchgrpo.rewards.digits_judge import DigitJudge
from branchgrpo.rewards.reward_set import RewardSet, WeightedReward
from branchgrpo.training.config.schema import ModelConfig, RewardConfig, TrainConfig
from branchgrpo.training.digits import digit_condition, digits_judge, pretrained_classifier, pretrained_generator
from branchgrpo.training.digits_classifier import ClassifierConfig
from branchgrpo.training.digits_generator import GeneratorConfig
from branchgrpo.training.engine.distributed import Cluster
from branchgrpo.training.engine.task import DTYPES, Task

REWARDS = ("digits", "digits_judge")


class JudgeReward:
    """1 where the judge reads the digit of the prompt, else 0: for evaluations, it has steps and no slope (REW-1)."""

    name = "digits_judge"
    version = DigitJudge.name
    range = (0.0, 1.0)

    def __init__(self, judge: DigitJudge) -> None:
        self.judge = judge

    def __call__(self, samples: Float[Tensor, "items *sample"], prompts: Sequence[Prompt]) -> Float64[Tensor, "items"]:
        """A verdict a sample.

        Raises:
            InputError: samples that are not 64 finite pixels.
        """
        wanted = torch.tensor([int(prompt.text) for prompt in prompts])
        return (self.judge.read(samples) == wanted).double().to(samples.device)


def configured(base: Any, options: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> Any:
    """A dataclass with some fields replaced.

    Raises:
        OptionError: a field that cannot be set.
    """
    for key in options:
        if key not in allowed:
            raise OptionError(f"{name}.{key}", options[key], f"left out, or one of {list(allowed)}")
    return replace(base, **options)


def digits_generator(model: ModelConfig) -> DigitsVelocity:
    """The pretrained network of ``[model]``, from the digits' cache.

    Raises:
        OptionError: an option that the network cannot follow.
    """
    for name, value, plain in (
        ("lora", model.lora, None), ("gradient_checkpointing", model.gradient_checkpointing, False),
        ("height", model.height, 0), ("width", model.width, 0), ("frames", model.frames, 1),
        ("prompt_cache", model.prompt_cache, ""),
    ):  # fmt: skip
        if value != plain:
            raise OptionError(f"model.{name}", value, f"{plain!r} for the digits")
    options = dict(model.options)
    network = configured(
        DigitsConfig(), options.pop("network", {}), "model.options.network", tuple(f.name for f in fields(DigitsConfig))
    )
    config = configured(GeneratorConfig(network=network), options, "model.options", ("seed", "steps", "batch"))
    generator = pretrained_generator(config)
    if model.guidance is not None:
        guided = DigitsVelocity(network, Guidance(model.guidance, model.guidance_scale or 1.0))
        guided.load_state_dict(generator.state_dict())
        return guided
    return generator


def digits_reward_model(reward: RewardConfig, device: torch.device) -> RewardModel:
    """The reward of one ``[[rewards]]`` table.

    Raises:
        OptionError: an unknown name or option.
    """
    if reward.name == "digits_judge":
        configured(DigitsRewardConfig(), reward.options, "rewards.digits_judge.options", ())
        return JudgeReward(digits_judge())
    if reward.name != "digits":
        raise OptionError("rewards.name", reward.name, f"one of {list(REWARDS)} for the digits")
    options = dict(reward.options)
    classifier = configured(
        ClassifierConfig(), options.pop("classifier", {}), "rewards.digits.options.classifier",
        ("channels", "steps", "seed"),
    )  # fmt: skip
    names = tuple(field.name for field in fields(DigitsRewardConfig))
    config = configured(DigitsRewardConfig(), options, "rewards.digits.options", names)
    return DigitsReward(pretrained_classifier(classifier).to(device), config)


def digits_task(config: TrainConfig, cluster: Cluster) -> Task:
    """Prompts "0" … "9", 8×8 images as states, all weights trained.

    Raises:
        OptionError: an option that means nothing here, or an unknown reward.
    """
    network = digits_generator(config.model).to(cluster.device)
    dtype = DTYPES[config.model.dtype]
    low = dtype.itemsize < 4
    network = network.to(torch.float32 if low else dtype).eval().requires_grad_(True)
    trained = [WeightedReward(digits_reward_model(r, cluster.device), r.weight)
               for r in config.rewards if not r.held_out]  # fmt: skip
    held_out = [WeightedReward(digits_reward_model(r, cluster.device)) for r in config.rewards if r.held_out]

    def condition(prompts: Sequence[Prompt]) -> TensorCondition:
        return digit_condition(prompts, cluster.device)

    def prepare(prompts: Sequence[Prompt]) -> None:
        digit_condition(prompts)

    return Task(
        network=network,
        latent_shape=LATENT_SHAPE,
        condition=condition,
        prepare=prepare,
        decode=None,
        rewards=RewardSet(tuple(trained)),
        held_out=RewardSet(tuple(held_out)) if held_out else None,
        device=cluster.device,
        lora=False,
        autocast=dtype if low else None,
        experts=1,
        unused=False,
    )
