"""The digits task put together: prompts, conditions, the pretrained generator, the reward and its judge."""

from collections.abc import Sequence

import torch

from branchgrpo.models import digits as network_code
from branchgrpo.models.digits import CLASSES, DigitsVelocity
from branchgrpo.reference.protocols import Prompt, TensorCondition
from branchgrpo.rewards import digits as reward_code
from branchgrpo.rewards.digits import DigitClassifier, DigitsReward, DigitsRewardConfig, digit_of
from branchgrpo.rewards.digits_judge import DigitJudge
from branchgrpo.training import digits_classifier, digits_data, digits_generator
from branchgrpo.training.digits_cache import cached
from branchgrpo.training.digits_classifier import ClassifierConfig, train_classifier
from branchgrpo.training.digits_data import SplitConfig, load_part
from branchgrpo.training.digits_generator import GeneratorConfig, StepCallback, train_generator


def digit_prompts() -> tuple[Prompt, ...]:
    """The ten prompts "0" … "9"; a prompt's id is its digit."""
    return tuple(Prompt(digit, str(digit)) for digit in range(CLASSES))


def digit_condition(prompts: Sequence[Prompt], device: torch.device | None = None) -> TensorCondition:
    """The generator's condition: one label a prompt, on a device, by default the CPU.

    Raises:
        InputError: a prompt that names no digit.
    """
    labels = torch.tensor([digit_of(prompt) for prompt in prompts], dtype=torch.int64, device=device)
    return TensorCondition({"label": labels})


def pretrained_generator(config: GeneratorConfig | None = None, on_step: StepCallback | None = None) -> DigitsVelocity:
    """The generator, from the cache or trained now (about half a minute on one core).

    Args:
        config: what its weights depend on.
        on_step: told of the training's progress; not called when the cache has the weights.
    """
    config = config or GeneratorConfig()
    return cached(
        "digits-generator",
        config,
        (network_code, digits_data, digits_generator),
        build=lambda: DigitsVelocity(config.network),
        train=lambda: train_generator(config, load_part("generator", config.split), on_step),
    )


def pretrained_classifier(
    config: ClassifierConfig | None = None, on_step: StepCallback | None = None
) -> DigitClassifier:
    """The reward's classifier, from the cache or trained now (about ten seconds on one core)."""
    config = config or ClassifierConfig()
    return cached(
        "digits-classifier",
        config,
        (reward_code, digits_data, digits_classifier),
        build=lambda: DigitClassifier(config.channels),
        train=lambda: train_classifier(config, load_part("classifier", config.split), on_step),
    )


def digits_reward(config: DigitsRewardConfig | None = None) -> DigitsReward:
    """The reward with its trained classifier."""
    return DigitsReward(pretrained_classifier(), config)


def digits_judge(config: SplitConfig | None = None) -> DigitJudge:
    """The judge, fitted to its own third of the images (milliseconds; not cached)."""
    data = load_part("judge", config)
    return DigitJudge(data.images, data.labels)
