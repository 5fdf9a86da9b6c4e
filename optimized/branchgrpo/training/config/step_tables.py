"""One iteration: the tables ``[rollout]``, ``[update]``, ``[optimizer]`` and ``[ema]``."""

from dataclasses import dataclass
from typing import Literal, get_args

from branchgrpo.reference.errors import OptionError
from branchgrpo.training.config.checks import check_flag, check_integer, check_name, check_number
from branchgrpo.training.config.policy_tables import DType

Noise = Literal["keyed", "fast"]
StepPer = Literal["iteration", "member"]
OptimizerKind = Literal["adamw", "adamw_fused", "adamw_8bit"]
Schedule = Literal["constant", "linear", "cosine"]

LARGEST = 1000.0
"""Of a learning rate, a weight decay and an eps; far larger ones take the weights out of float32."""


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
    noise: Noise = "keyed"
    chunk: int = 0
    pad: bool = False
    offload: bool = False
    compile: bool = False
    decode_chunk: int = 64

    def __post_init__(self) -> None:
        check_name("rollout.dtype", self.dtype, get_args(DType))
        check_name("rollout.storage_dtype", self.storage_dtype, get_args(DType))
        check_name("rollout.noise", self.noise, get_args(Noise))
        check_integer("rollout.chunk", self.chunk, 0)
        check_integer("rollout.decode_chunk", self.decode_chunk, 1)
        for name in ("pad", "offload", "compile"):
            check_flag(f"rollout.{name}", getattr(self, name))
        if self.pad and self.chunk == 0:
            raise OptionError("rollout.pad", self.pad, "false without a rollout.chunk to fill")


@dataclass(frozen=True)
class UpdateConfig:
    """``[update]``: from advantages to new weights.

    Attributes:
        accumulation: parts into which a rank's prompts of one iteration are cut; it changes memory, not the update.
        micro_batch: most parents a forward and backward; 0 takes all at once.
        inner_epochs: updates from one rollout, old log-probabilities frozen.
        step_per: one optimiser step a ``member`` of a plan family (a perturbed step k), or one for all of an
            ``iteration``; a plan is its own only member.
        max_grad_norm: gradients are clipped to this norm on every step; inf switches it off.
    """

    accumulation: int = 1
    micro_batch: int = 0
    inner_epochs: int = 1
    step_per: StepPer = "member"
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        check_integer("update.accumulation", self.accumulation, 1)
        check_integer("update.micro_batch", self.micro_batch, 0)
        check_integer("update.inner_epochs", self.inner_epochs, 1)
        check_name("update.step_per", self.step_per, get_args(StepPer))
        check_number("update.max_grad_norm", self.max_grad_norm, 0.0, open_low=True, infinite=True)


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
    kind: OptimizerKind = "adamw"
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        check_number("optimizer.learning_rate", self.learning_rate, 0.0, LARGEST, open_low=True)
        if len(self.betas) != 2:
            raise OptionError("optimizer.betas", self.betas, "two numbers")
        for i, beta in enumerate(self.betas):
            check_number(f"optimizer.betas[{i}]", beta, 0.0, 1.0, open_high=True)
        check_number("optimizer.eps", self.eps, 0.0, LARGEST, open_low=True)
        check_number("optimizer.weight_decay", self.weight_decay, 0.0, LARGEST)
        check_name("optimizer.kind", self.kind, get_args(OptimizerKind))
        check_name("optimizer.schedule", self.schedule, get_args(Schedule))
        check_integer("optimizer.warmup_steps", self.warmup_steps, 0)
        check_number("optimizer.final_fraction", self.final_fraction, 0.0, 1.0)
        if self.schedule == "constant" and self.final_fraction != 0.0:
            raise OptionError("optimizer.final_fraction", self.final_fraction, "left out of a constant schedule")


@dataclass(frozen=True)
class EmaConfig:
    """``[ema]``: an exponential moving average of the trained weights, in float32; evaluated and exported.

    Attributes:
        decay: in [0, 1); 0 keeps none.
        every: optimiser steps between two updates.
    """

    decay: float = 0.0
    every: int = 1

    def __post_init__(self) -> None:
        check_number("ema.decay", self.decay, 0.0, 1.0, open_high=True)
        check_integer("ema.every", self.every, 1)
        if self.decay == 0.0 and self.every != 1:
            raise OptionError("ema.every", self.every, "left out where ema.decay = 0 keeps no average")
