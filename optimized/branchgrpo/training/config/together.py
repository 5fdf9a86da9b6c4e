"""What the tables of a run must agree on: an option that would have no use is an error, not a silent nothing."""

from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.rewards.registry import NAMES
from branchgrpo.training.config.checks import check_name, check_text, near
from branchgrpo.training.config.method import build_method
from branchgrpo.training.config.policy_tables import DIGITS, TINY, DataConfig, MethodConfig, ModelConfig, RewardConfig
from branchgrpo.training.config.step_tables import UpdateConfig

OF_DIGITS = (DIGITS, "digits_judge")
"""Rewards of the digits' images."""


def check_method(method: MethodConfig, update: UpdateConfig) -> None:
    """The method can be built, and ``update.step_per`` means something for it."""
    built = build_method(method)
    if update.step_per == "iteration" and not isinstance(built.sampler, PlanFamily):
        raise OptionError("update.step_per", update.step_per, f"left out: {method.preset} is no plan family")


def check_rewards(rewards: tuple[RewardConfig, ...], model: ModelConfig) -> None:
    """Names are known and told apart, one reward trains, and the digits' reward goes with the digits' model."""
    seen: set[tuple[str, str]] = set()
    for i, reward in enumerate(rewards):
        check_name(f"rewards[{i}].name", reward.name, (*OF_DIGITS, *NAMES))
        told = reward.options.get("name", "")
        check_text(f"rewards[{i}].options.name", told)
        label = (reward.name, told)
        if label in seen:
            raise OptionError(f"rewards[{i}].name", reward.name, "named once, or told apart by options.name")
        seen.add(label)
        if (reward.name in OF_DIGITS) != (model.source == DIGITS):
            legal = f"{' or '.join(OF_DIGITS)}, which score the 8 × 8 images of model.source = 'digits'"
            other = f"a reward of decoded images: {reward.name} goes with model.source = 'digits', not {model.source!r}"
            raise OptionError(f"rewards[{i}].name", reward.name, legal if model.source == DIGITS else other)
    if not any(reward.trains for reward in rewards):
        found = tuple((reward.name, reward.weight, reward.held_out) for reward in rewards)
        raise OptionError("rewards", found, "at least one that is not held out and has a weight other than 0")


def check_model(model: ModelConfig) -> None:
    """Only a pipeline has a size to choose, adapters and options of loading; only Wan has frames."""
    if model.source == DIGITS:
        unused = {
            "height": model.height,
            "lora": model.lora,
            "gradient_checkpointing": model.gradient_checkpointing,
            "prompt_cache": model.prompt_cache,
        }
        for name, value in unused.items():
            if value:
                raise OptionError(f"model.{name}", value, "left out: the digits model has no use for it")
        if model.guidance == "embedded":
            raise OptionError("model.guidance", model.guidance, "none or classifier_free for the digits model")
    elif close := near(model.source, () if model.built_in or "/" in model.source else (DIGITS, *TINY), 0.8):
        raise OptionError("model.source", model.source, f"{close!r}; or ./{model.source} for a folder")
    elif not model.built_in and model.height == 0:
        raise OptionError("model.height, model.width", (0, 0), "given in pixels for a pipeline")
    if model.built_in and model.frames > 1 and model.source != "tiny-wan":
        raise OptionError("model.frames", model.frames, f"1: {model.source} makes images")


def check_data(data: DataConfig, model: ModelConfig, update: UpdateConfig) -> None:
    """A real model needs prompts of its own, and the prompts of an iteration can be cut into its parts."""
    if not data.prompts and not model.built_in:
        raise OptionError("data.prompts", data.prompts, "a file: the ten digits are for the digits and tiny models")
    if data.prompts_per_iteration % update.accumulation:
        legal = f"a divisor of data.prompts_per_iteration = {data.prompts_per_iteration}"
        raise OptionError("update.accumulation", update.accumulation, legal)


def check_together(
    method: MethodConfig,
    model: ModelConfig,
    rewards: tuple[RewardConfig, ...],
    data: DataConfig,
    update: UpdateConfig,
) -> None:
    """Check the tables of a run against each other.

    Raises:
        OptionError: an option that contradicts another, or that nothing would use.
    """
    check_method(method, update)
    check_model(model)
    check_rewards(rewards, model)
    check_data(data, model, update)
