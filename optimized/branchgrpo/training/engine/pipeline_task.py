"""A diffusers pipeline as a training task: LoRA or all weights, prompts through the cache, decoded samples rewarded."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from branchgrpo.models.auto import load_backbone
from branchgrpo.models.backbone import Backbone
from branchgrpo.models.lora import LoraOptions
from branchgrpo.models.options import LoadOptions
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.protocols import Condition, Guidance, Prompt
from branchgrpo.rewards.registry import LAZY, RewardSpec, build_rewards, loader
from branchgrpo.rewards.reward_set import RewardSet
from branchgrpo.training.config.policy_tables import TINY
from branchgrpo.training.config.schema import ModelConfig, RewardConfig, TrainConfig
from branchgrpo.training.engine.distributed import Cluster
from branchgrpo.training.engine.run_folder import PROMPTS
from branchgrpo.training.engine.task import DTYPES, Task

RESERVED = ("cache", "gradient_checkpointing")
"""Loading options that have a place of their own in ``[model]``."""


def load_options(model: ModelConfig, run_folder: Path) -> LoadOptions:
    """How the pipeline is loaded.

    Raises:
        OptionError: an option that ``LoadOptions`` does not have, or that ``[model]`` has itself.
    """
    names = [field.name for field in fields(LoadOptions) if field.name not in RESERVED]
    options: dict[str, Any] = dict(model.options)
    for name in options:
        if name not in names:
            raise OptionError(f"model.options.{name}", options[name], f"left out, or one of {names}")
    if "vae_dtype" in options:
        if options["vae_dtype"] not in DTYPES:
            raise OptionError("model.options.vae_dtype", options["vae_dtype"], f"one of {list(DTYPES)}")
        options["vae_dtype"] = DTYPES[options["vae_dtype"]]
    cache = Path(model.prompt_cache).expanduser() if model.prompt_cache else run_folder / PROMPTS
    return LoadOptions(cache=cache, gradient_checkpointing=model.gradient_checkpointing, **options)


def pipeline_folder(source: str) -> str:
    """The folder or hub id of ``model.source``; a tiny pipeline is built in the project's cache."""
    if source not in TINY:
        return source
    from branchgrpo.models.tiny.folders import tiny_pipeline

    return str(tiny_pipeline(source))


def sample_size(model: ModelConfig) -> tuple[int, int]:
    """Height and width in pixels; a tiny pipeline has a size of its own."""
    if model.height or model.source not in TINY:
        return model.height, model.width
    from branchgrpo.models.tiny.folders import TINY as SIZES

    return SIZES[model.source].size[1:]


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which the libraries that load weights draw no progress bars of their own."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        diffusers_logging.enable_progress_bar()
        transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def load_policy(config: TrainConfig, cluster: Cluster) -> Backbone:
    """The backbone of ``[model]``: trained weights in float32 at least; an adapter's first weights follow the seed."""
    model = config.model
    lora = None
    if model.lora is not None:
        lora = LoraOptions(model.lora.rank, model.lora.alpha, model.lora.targets)
    dtype = DTYPES[model.dtype]
    if lora is None and dtype.itemsize < 4:
        dtype = torch.float32
    guidance = None
    if model.guidance is not None:
        guidance = Guidance(model.guidance, 1.0 if model.guidance_scale is None else model.guidance_scale)
    folder = pipeline_folder(model.source)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        return load_backbone(
            folder,
            dtype=dtype,
            device=cluster.device,
            guidance=guidance,
            lora=lora,
            options=load_options(model, Path(config.run.folder)),
        )


def reward_set(rewards: Sequence[RewardConfig], device: torch.device) -> RewardSet:
    """Reward models on the run's device, where they have one and no option names another."""
    specs = []
    for reward in rewards:
        options = dict(reward.options)
        if reward.name in LAZY and "device" in inspect.signature(loader(*LAZY[reward.name])).parameters:
            options.setdefault("device", str(device))
        specs.append(RewardSpec(reward.name, 1.0 if reward.held_out else reward.weight, options))
    return build_rewards(specs)


def pipeline_task(config: TrainConfig, cluster: Cluster) -> Task:
    """The task of a pipeline folder or hub id.

    Raises:
        OptionError, InputError: a folder, size, guidance, option or reward that does not fit.
    """
    held = [reward for reward in config.rewards if reward.held_out]
    rewards = reward_set([reward for reward in config.rewards if not reward.held_out], cluster.device)
    held_out = reward_set(held, cluster.device) if held else None
    model = config.model
    with quiet():
        backbone = load_policy(config, cluster)
    dtype, lora = DTYPES[model.dtype], model.lora is not None

    def condition(prompts: Sequence[Prompt]) -> Condition:
        return backbone.encode([prompt.text for prompt in prompts])

    def prepare(prompts: Sequence[Prompt]) -> None:
        with quiet():
            backbone.fill_prompt_cache([prompt.text for prompt in prompts][cluster.rank :: cluster.size])

    return Task(
        network=backbone,
        latent_shape=backbone.latent_shape(*sample_size(model), model.frames),
        condition=condition,
        prepare=prepare,
        decode=backbone.decode,
        rewards=rewards,
        held_out=held_out,
        device=cluster.device,
        lora=lora,
        autocast=dtype if dtype.itemsize < 4 and not lora else None,
        experts=len(backbone.experts),
        unused=not lora or len(backbone.experts) > 1,
    )
