"""What is trained and on what: the tables ``[run]``, ``[method]``, ``[model]``, ``[[rewards]]`` and ``[data]``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.presets import PRESETS
from branchgrpo.training.config.checks import (
    check_flag,
    check_integer,
    check_name,
    check_number,
    check_text,
    plain,
)

DType = Literal["float64", "float32", "bfloat16", "float16"]
Parallel = Literal["auto", "ddp", "fsdp2"]
LogProb = Literal["mean", "sum"]
GuidanceKind = Literal["none", "embedded", "classifier_free"]

DIGITS = "digits"
TINY = ("tiny-flux", "tiny-sd3", "tiny-qwen-image", "tiny-wan")
"""Sources with random weights, built when they are needed."""
SEEDS = 2**63 - 1
"""Largest seed."""
MOST_ITERATIONS = 10**6
"""Of a run: all of them are looked through before the first, for what moves with the iteration."""
DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


@dataclass(frozen=True)
class RunConfig:
    """``[run]``: how long, where, and from which seed.

    Attributes:
        folder: everything the run writes goes here.
        iterations: rollouts, each followed by its updates.
        seed: of noise, windows, subsets, the sampler's order, and the adapter's first weights.
        device: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` (the rank's GPU where there is one).
        parallel: ``auto`` is DDP where there are several processes; ``fsdp2`` shards the weights over them.
        deterministic: only algorithms of torch that give the same bits in every run; slower on a GPU, and an operation
            that has none ends the run.
    """

    folder: str = "runs/train"
    iterations: int = 300
    seed: int = 0
    device: str = "auto"
    parallel: Parallel = "auto"
    deterministic: bool = False

    def __post_init__(self) -> None:
        check_text("run.folder", self.folder, empty=False)
        check_integer("run.iterations", self.iterations, 1, MOST_ITERATIONS)
        check_integer("run.seed", self.seed, 0, SEEDS)
        if not isinstance(self.device, str) or not DEVICE.fullmatch(self.device):
            raise OptionError("run.device", self.device, "auto, cpu, cuda or cuda:N")
        check_name("run.parallel", self.parallel, get_args(Parallel))
        check_flag("run.deterministic", self.deterministic)


@dataclass(frozen=True)
class MethodConfig:
    """``[method]``: a published method and what differs from it.

    Attributes:
        preset: name of a method, ``branchgrpo plan`` lists them.
        settings: arguments of the preset's builder in place of its published ones, such as steps, splits, eta, beta.
        log_prob: reduction of log-probabilities; None is the preset's.
        fusion, normalization, objective: fields of these options in place of the preset's.
    """

    preset: str = "branchgrpo"
    settings: Mapping[str, Any] = field(default_factory=dict)
    log_prob: LogProb | None = None
    fusion: Mapping[str, Any] = field(default_factory=dict)
    normalization: Mapping[str, Any] = field(default_factory=dict)
    objective: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("method.preset", self.preset, PRESETS)
        if self.log_prob is not None:
            check_name("method.log_prob", self.log_prob, get_args(LogProb))
        for name in ("settings", "fusion", "normalization", "objective"):
            object.__setattr__(self, name, plain(f"method.{name}", getattr(self, name)))


@dataclass(frozen=True)
class LoraConfig:
    """``[model.lora]``: train a low-rank adapter in place of all weights.

    Attributes:
        rank: r ≥ 1.
        alpha: the update is scaled by alpha / rank.
        targets: ends of the names of the adapted layers; None is the family's attention projections.
    """

    rank: int = 32
    alpha: int = 64
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_integer("model.lora.rank", self.rank, 1)
        check_integer("model.lora.alpha", self.alpha, 1)
        if self.targets is not None:
            if not self.targets:
                raise OptionError("model.lora.targets", self.targets, "at least one layer, or left out")
            for i, target in enumerate(self.targets):
                check_text(f"model.lora.targets[{i}]", target, empty=False)


@dataclass(frozen=True)
class ModelConfig:
    """``[model]``: the policy.

    Attributes:
        source: ``digits`` (the demo's generator), ``tiny-flux``, ``tiny-sd3``, ``tiny-qwen-image``, ``tiny-wan``
            (random weights, for trying things out), a diffusers pipeline's folder, or a hub id.
        dtype: of the frozen weights and of the network's arithmetic; trained weights are kept in float32 at least.
        guidance: how guidance enters the velocity; None is the pipeline's default.
        guidance_scale: its scale; given if and only if ``guidance`` is ``embedded`` or ``classifier_free``.
        height, width, frames: of a sample, in pixels; 0 is the model's own (digits, tiny ones).
        lora: None trains every weight.
        gradient_checkpointing: recompute activations in the backward pass.
        prompt_cache: folder of encoded prompts; "" is the run's own.
        options: further fields of the backbone's ``LoadOptions``.
    """

    source: str = "digits"
    dtype: DType = "float32"
    guidance: GuidanceKind | None = None
    guidance_scale: float | None = None
    height: int = 0
    width: int = 0
    frames: int = 1
    lora: LoraConfig | None = None
    gradient_checkpointing: bool = False
    prompt_cache: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_text("model.source", self.source, empty=False)
        check_name("model.dtype", self.dtype, get_args(DType))
        if self.guidance is not None:
            check_name("model.guidance", self.guidance, get_args(GuidanceKind))
        scaled = self.guidance in ("embedded", "classifier_free")
        if scaled and self.guidance_scale is None:
            raise OptionError("model.guidance_scale", None, f"given beside guidance = {self.guidance!r}")
        if self.guidance_scale is not None:
            if not scaled:
                raise OptionError("model.guidance_scale", self.guidance_scale, "left out without a guidance to scale")
            check_number("model.guidance_scale", self.guidance_scale, 0.0)
        for name in ("height", "width"):
            check_integer(f"model.{name}", getattr(self, name), 0)
        check_integer("model.frames", self.frames, 1)
        if (self.height == 0) != (self.width == 0):
            raise OptionError("model.height, model.width", (self.height, self.width), "both given or both 0")
        check_flag("model.gradient_checkpointing", self.gradient_checkpointing)
        check_text("model.prompt_cache", self.prompt_cache)
        object.__setattr__(self, "options", plain("model.options", self.options))

    @property
    def built_in(self) -> bool:
        """Whether the source is one of the project's own, with a size and prompts of its own."""
        return self.source == DIGITS or self.source in TINY


@dataclass(frozen=True)
class RewardConfig:
    """``[[rewards]]``: one reward model.

    Attributes:
        name: ``digits`` or ``digits_judge`` for the digits model, else a name of the rewards' registry.
        weight: in the sum of advantages; 0 is scored and logged and does not train.
        held_out: scored in evaluations only: it tells whether the trained ones are being hacked.
        options: of its builder, such as ``checkpoint``.
    """

    name: str = "digits"
    weight: float = 1.0
    held_out: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_text("rewards.name", self.name, empty=False)
        check_number("rewards.weight", self.weight)
        check_flag("rewards.held_out", self.held_out)
        object.__setattr__(self, "options", plain("rewards.options", self.options))

    @property
    def trains(self) -> bool:
        """Whether its advantages count in the update."""
        return not self.held_out and self.weight != 0.0


@dataclass(frozen=True)
class DataConfig:
    """``[data]``: the prompts.

    Attributes:
        prompts: a .txt, .jsonl, .csv or .parquet file; "" are the ten digits (digits and tiny models only).
        column: of the prompt in a table; "" takes ``prompt``, ``text`` or ``caption``, the first that is there.
        held_out: file of the evaluation's prompts; "" holds back the last ``held_out_prompts`` of ``prompts``; the ten
            digits are both trained and evaluated.
        held_out_prompts: prompts of an evaluation.
        prompts_per_iteration: over all ranks and accumulation parts.
        shuffle: a new order an epoch, from the run's seed.
    """

    prompts: str = ""
    column: str = ""
    held_out: str = ""
    held_out_prompts: int = 8
    prompts_per_iteration: int = 10
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("prompts", "column", "held_out"):
            check_text(f"data.{name}", getattr(self, name))
        for name in ("column", "held_out"):
            if getattr(self, name) and not self.prompts:
                raise OptionError(f"data.{name}", getattr(self, name), "left out without data.prompts")
        check_integer("data.held_out_prompts", self.held_out_prompts, 1)
        check_integer("data.prompts_per_iteration", self.prompts_per_iteration, 1)
        check_flag("data.shuffle", self.shuffle)
