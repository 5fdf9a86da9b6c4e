"""What a training run is made of: one frozen dataclass a table of its TOML file, each checked when it is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

DType = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class RunConfig:
    """``[run]``: how long, where, and from which seed.

    Attributes:
        folder: everything the run writes goes here.
        iterations: rollouts, each followed by its updates.
        seed: of noise, windows, subsets, the sampler's order, and the adapter's first weights.
        device: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` (the rank's GPU where there is one).
        parallel: ``auto`` is DDP where there are several processes; ``fsdp2`` shards the weights over them.
    """

    folder: str = "runs/train"
    iterations: int = 300
    seed: int = 0
    device: str = "auto"
    parallel: Literal["auto", "ddp", "fsdp2"] = "auto"


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
    log_prob: Literal["mean", "sum"] | None = None
    fusion: Mapping[str, Any] = field(default_factory=dict)
    normalization: Mapping[str, Any] = field(default_factory=dict)
    objective: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoraConfig:
    """``[model.lora]``: train a low-rank adapter in place of all weights."""

    rank: int = 32
    alpha: int = 64
    targets: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """``[model]``: the policy.

    Attributes:
        source: ``digits`` (the demo's generator), ``tiny-flux``, ``tiny-sd3``, ``tiny-qwen-image``, ``tiny-wan``
            (random weights, for trying things out), a diffusers pipeline's folder, or a hub id.
        dtype: of the frozen weights and of the network's arithmetic; trained weights are kept in float32 at least.
        guidance: how guidance enters the velocity; None is the pipeline's default.
        guidance_scale: its scale; given if and only if ``guidance`` is.
        height, width, frames: of a sample, in pixels; 0 is the model's own (digits, tiny ones).
        lora: None trains every weight.
        gradient_checkpointing: recompute activations in the backward pass.
        prompt_cache: folder of encoded prompts; "" is the run's own.
        options: further fields of the backbone's ``LoadOptions``.
    """

    source: str = "digits"
    dtype: DType = "float32"
    guidance: Literal["none", "embedded", "classifier_free"] | None = None
    guidance_scale: float | None = None
    height: int = 0
    width: int = 0
    frames: int = 1
    lora: LoraConfig | None = None
    gradient_checkpointing: bool = False
    prompt_cache: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardConfig:
    """``[[rewards]]``: one reward model.

    Attributes:
        name: ``digits``, or a name of the rewards' registry.
        weight: in the sum of advantages; 0 is scored and logged and does not train.
        held_out: scored in evaluations only: it tells whether the trained ones are being hacked.
        options: of its builder, such as ``checkpoint``.
    """

    name: str = "digits"
    weight: float = 1.0
    held_out: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataConfig:
    """``[data]``: the prompts.

    Attributes:
        prompts: a .txt, .jsonl, .csv or .parquet file; "" are the ten digits.
        column: of the prompt in a table; "" takes ``prompt``, ``text`` or ``caption``, the first that is there.
        held_out: file of the evaluation's prompts; "" holds back the last ``held_out_prompts`` of ``prompts``.
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


@dataclass(frozen=True)
class RolloutConfig:
    """``[rollout]``: how trees are grown; see ``Sampling``.

    Attributes:
        dtype: of the arithmetic on states.
        storage_dtype: in which states are kept.
        noise: ``keyed`` (NumPy's Philox, the same on every device) or ``fast`` (made on the device).
        chunk: most items a denoiser call; 0 puts all that is ready into one.
        pad: fill every call up to ``chunk`` items.
        offload: keep states in the CPU's memory.
        compile: compile large steps.
        decode_chunk: leaves decoded and scored at a time.
    """

    dtype: DType = "float32"
    storage_dtype: DType = "float32"
    noise: Literal["keyed", "fast"] = "keyed"
    chunk: int = 0
    pad: bool = False
    offload: bool = False
    compile: bool = False
    decode_chunk: int = 64


@dataclass(frozen=True)
class UpdateConfig:
    """``[update]``: from advantages to new weights.

    Attributes:
        accumulation: parts into which a rank's prompts of one iteration are cut; it changes memory, not the update.
        micro_batch: most parents a forward and backward; 0 takes all at once.
        inner_epochs: updates from one rollout, old log-probabilities frozen.
        step_per: plan families only: one optimiser step an ``iteration``, or one a ``member`` (a perturbed step k).
        max_grad_norm: gradients are clipped to this norm on every step; inf switches it off.
    """

    accumulation: int = 1
    micro_batch: int = 0
    inner_epochs: int = 1
    step_per: Literal["iteration", "member"] = "member"
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class OptimizerConfig:
    """``[optimizer]``: AdamW and its learning rate.

    Attributes:
        learning_rate, betas, eps, weight_decay: of AdamW.
        kind: ``adamw``, ``adamw_fused`` (one kernel a step), or ``adamw_8bit`` (bitsandbytes, if installed).
        schedule: of the learning rate after the warm-up, over the optimiser's steps.
        warmup_steps: linear from 0.
        final_fraction: of the learning rate at the end of ``linear`` and ``cosine``.
    """

    learning_rate: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-4
    kind: Literal["adamw", "adamw_fused", "adamw_8bit"] = "adamw"
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    final_fraction: float = 0.0


@dataclass(frozen=True)
class EmaConfig:
    """``[ema]``: an exponential moving average of the trained weights, in float32; evaluated and exported.

    Attributes:
        decay: in [0, 1); 0 keeps none.
        every: optimiser steps between two updates.
    """

    decay: float = 0.0
    every: int = 1


@dataclass(frozen=True)
class Limit:
    """Thresholds of one monitor: beyond ``warn`` a line in the log, beyond ``stop`` the end of the run; None never."""

    warn: float | None = None
    stop: float | None = None


@dataclass(frozen=True)
class MonitorsConfig:
    """``[monitors]``: a threshold each; the comments say what is compared, and in which direction.

    Attributes:
        log_prob_drift: largest |log ρ| of the first update after a rollout, above; 0 on policy.
        clip_fraction: share of clipped ratios, above.
        kl: to the frozen reference, above.
        advantage_spread: smallest std of a depth's advantages, below.
        reward_spread: std of the rewards within a tree, its mean over trees, below.
        effective_sample_size: of path weights at the roots over the leaves, below.
        degenerate_groups: share of trees whose rewards are all equal, above.
        gradient_norm: before clipping, above.
        diversity: mean distance of a tree's leaves over that of the first iteration's, below.
        reward_gap: rise of the trained reward less the rise of the held-out one, in standard deviations of the
            first evaluation, above: the alarm for reward hacking.
        costly_every: iterations between two measurements of what costs calls of its own (gradient norm a depth).
    """

    log_prob_drift: Limit = Limit(warn=1e-5, stop=None)
    clip_fraction: Limit = Limit(warn=0.5)
    kl: Limit = Limit(warn=1.0)
    advantage_spread: Limit = Limit(warn=1e-3)
    reward_spread: Limit = Limit(warn=1e-6)
    effective_sample_size: Limit = Limit(warn=0.05)
    degenerate_groups: Limit = Limit(warn=0.5)
    gradient_norm: Limit = Limit(warn=100.0)
    diversity: Limit = Limit(warn=0.3)
    reward_gap: Limit = Limit(warn=2.0)
    costly_every: int = 0


@dataclass(frozen=True)
class EvaluationConfig:
    """``[evaluation]``: deterministic samples of held-out prompts from noise that never changes.

    Attributes:
        every: iterations; 0 evaluates never.
        samples: a prompt.
        steps: of the ODE; 0 is the plan's number.
        seed: of the noise.
        grid: prompts in the sample grid that is saved; 0 saves none.
    """

    every: int = 50
    samples: int = 4
    steps: int = 0
    seed: int = 2024
    grid: int = 8


@dataclass(frozen=True)
class CheckpointConfig:
    """``[checkpoint]``: everything needed to go on.

    Attributes:
        every: iterations; 0 saves at the end (or when interrupted) only.
        keep: newest checkpoints that stay; 0 keeps all.
        export: write a diffusers-loadable folder (or the digits network) at the end.
    """

    every: int = 25
    keep: int = 2
    export: bool = True


@dataclass(frozen=True)
class LoggingConfig:
    """``[logging]``: beside ``metrics.jsonl``, which is always written.

    Attributes:
        progress: a line with the time left on standard error.
        tensorboard: event files in the run's folder.
        wandb: Weights & Biases, if installed.
        wandb_project: its project.
        scores: every leaf's scores in ``scores.jsonl``.
    """

    progress: bool = True
    tensorboard: bool = False
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "branchgrpo"
    scores: bool = False


@dataclass(frozen=True)
class TrainConfig:
    """A whole run; every table of its TOML file."""

    run: RunConfig = field(default_factory=RunConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rewards: tuple[RewardConfig, ...] = (RewardConfig(),)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    monitors: MonitorsConfig = field(default_factory=MonitorsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
