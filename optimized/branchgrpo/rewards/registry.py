"""Reward models by name, for configurations: what a run's file may ask for."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.protocols import RewardModel
from branchgrpo.rewards.cache import CachedReward, ScoreCache
from branchgrpo.rewards.endpoint import Endpoint
from branchgrpo.rewards.judge import ALIGNMENT, MOTION, ImageJudge, JudgeOptions, MotionJudge
from branchgrpo.rewards.retry import Retry
from branchgrpo.rewards.reward_set import RewardSet, WeightedReward
from branchgrpo.rewards.score_parser import ScoreParser


@dataclass(frozen=True)
class RewardSpec:
    """A reward model as a configuration names it: name, weight, and the options of its builder."""

    name: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


def image_judge(name: str = "unified_reward", template_file: str | None = None, **options: Any) -> RewardModel:
    """A judge of images; ``template_file`` replaces the question."""
    template = ALIGNMENT if template_file is None else Path(template_file).read_text(encoding="utf-8")
    endpoint, asked = judge_parts(template, **options)
    return ImageJudge(name, endpoint, asked)


def motion_judge(
    name: str = "motion_quality", template_file: str | None = None, frames: int = 8, **options: Any
) -> RewardModel:
    """A judge of the motion of videos; ``template_file`` replaces the question."""
    template = MOTION if template_file is None else Path(template_file).read_text(encoding="utf-8")
    endpoint, asked = judge_parts(template, **options)
    return MotionJudge(name, endpoint, asked, frames=frames)


def judge_parts(
    template: str,
    *,
    base_url: str,
    model: str,
    api_key_env: str | None = None,
    timeout_s: float = 60.0,
    label: str = "Final Score",
    low: float = 1.0,
    high: float = 5.0,
    attempts: int = 4,
    base_s: float = 0.5,
    cap_s: float = 20.0,
    concurrency: int = 8,
    max_tokens: int = 1024,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[Endpoint, JudgeOptions]:
    """Endpoint and question of a judge from flat options; the key is read from the variable that is named.

    Raises:
        OptionError: a variable that is not set.
    """
    if api_key_env is not None and api_key_env not in os.environ:
        raise OptionError("judge.api_key_env", api_key_env, "the name of a variable that is set")
    key = None if api_key_env is None else os.environ[api_key_env]
    options = JudgeOptions(
        template=template,
        parser=ScoreParser(label, low, high),
        retry=Retry(attempts, base_s, cap_s),
        concurrency=concurrency,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )
    return Endpoint(base_url, model, timeout_s, key), options


def loader(module: str, path: str) -> Callable[..., RewardModel]:
    """A builder in a module that is imported when it is needed, e.g. ``HPSv21.load``."""
    built: Any = import_module(f"branchgrpo.rewards.{module}")
    for name in path.split("."):
        built = getattr(built, name)
    result: Callable[..., RewardModel] = built
    return result


LAZY = {
    "hps_v2.1": ("clip_rewards", "HPSv21.load"),
    "hpsv2_package": ("hpsv2_package", "HPSv2Package"),
    "pickscore": ("clip_rewards", "PickScore.load"),
    "clip": ("clip_rewards", "ClipScore.load"),
    "image_reward": ("image_reward", "ImageReward.load"),
    "aesthetic": ("aesthetic", "AestheticScore.load"),
    "ocr": ("ocr", "OCRAccuracy.rapidocr"),
    "linear": ("analytic", "LinearReward"),
    "quadratic": ("analytic", "QuadraticReward"),
    "colour": ("pixels", "ColourReward"),
    "contrast": ("pixels", "ContrastReward"),
}
JUDGES: dict[str, Callable[..., RewardModel]] = {"judge": image_judge, "motion_judge": motion_judge}
NAMES = (*LAZY, *JUDGES)


def build_reward(spec: RewardSpec, cache: ScoreCache | None = None) -> RewardModel:
    """The reward model that ``spec`` asks for, remembered in ``cache`` if there is one.

    Raises:
        OptionError: an unknown name, an unknown option, one of another type, or a required one that is missing.
    """
    if spec.name not in NAMES:
        raise OptionError("reward.name", spec.name, f"one of {list(NAMES)}")
    builder = JUDGES[spec.name] if spec.name in JUDGES else loader(*LAZY[spec.name])
    check_options(spec, [builder, judge_parts] if spec.name in JUDGES else [builder])
    try:
        model = builder(**spec.options)
    except (TypeError, AttributeError) as error:
        legal = f"of the types that its builder takes ({error})"
        raise OptionError(f"reward {spec.name}: options", dict(spec.options), legal) from error
    return model if cache is None else CachedReward(model, cache)


def check_options(spec: RewardSpec, builders: Sequence[Callable[..., object]]) -> None:
    """Raise ``OptionError`` for an option that no builder takes, or a required one that is not given."""
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = {
        name: parameter
        for builder in builders
        for name, parameter in inspect.signature(builder).parameters.items()
        if parameter.kind not in variadic and not (builder is judge_parts and name == "template")
    }
    for name in spec.options:
        if name not in parameters:
            raise OptionError(f"reward {spec.name}: option", name, f"one of {sorted(parameters)}")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in spec.options:
            raise OptionError(f"reward {spec.name}: {name}", None, "given")


def build_rewards(specs: Sequence[RewardSpec], cache: ScoreCache | None = None) -> RewardSet:
    """All rewards of a configuration with their weights."""
    return RewardSet(tuple(WeightedReward(build_reward(spec, cache), spec.weight) for spec in specs))
