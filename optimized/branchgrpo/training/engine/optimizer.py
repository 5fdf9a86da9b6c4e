"""AdamW over named weights, learning rates as a function of the step, and clipping on every step."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from branchgrpo.reference.errors import InputError, ModelError, OptionError
from branchgrpo.training.config.schema import OptimizerConfig

Named = Mapping[str, nn.Parameter]
"""The trained weights by name, in the network's order."""


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """The learning rate of optimiser step ``step`` (from 0) of ``total``.

    Linear from 0 over the warm-up (its first step has 1/warm-up of the rate), then constant, or linear or a half cosine
    down to ``final_fraction`` of it, which the last step would reach one step later.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    done = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps))
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * left)


def eight_bit() -> Any:
    """The 8-bit AdamW of bitsandbytes.

    Raises:
        OptionError: it is not installed.
    """
    try:
        from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        legal = "adamw or adamw_fused: bitsandbytes is not installed (pip install bitsandbytes)"
        raise OptionError("optimizer.kind", "adamw_8bit", legal) from None
    return AdamW8bit


def check_optimizer(config: OptimizerConfig, fsdp: bool) -> None:
    """Raise ``OptionError`` for a kind that cannot run here."""
    if config.kind == "adamw_8bit":
        if fsdp:
            raise OptionError("optimizer.kind", "adamw_8bit", "adamw or adamw_fused under fsdp2: its state is sharded")
        eight_bit()


def build_optimizer(config: OptimizerConfig, weights: Named) -> torch.optim.Optimizer:
    """AdamW; weight decay pulls matrices only, never biases, gains of norms or other vectors.

    Args:
        config: kind and constants.
        weights: everything that a step may change.

    Raises:
        OptionError: an 8-bit optimiser without bitsandbytes.
        InputError: nothing to train.
    """
    if not weights:
        raise InputError("trained weights", 0, "at least one")
    matrices = [p for p in weights.values() if p.ndim >= 2]
    vectors = [p for p in weights.values() if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        if params
    ]
    constants: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
    if config.kind == "adamw_8bit":
        result: torch.optim.Optimizer = eight_bit()(groups, **constants)
        return result
    return torch.optim.AdamW(groups, fused=config.kind == "adamw_fused", **constants)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(weights: Named, largest: float) -> float:
    """Scale all gradients so that their common norm is at most ``largest``; the norm before that.

    A sharded gradient's norm is that of the whole: every process computes the same.

    Raises:
        ModelError: a norm that is not finite; no weight has changed.
    """
    norm = nn.utils.clip_grad_norm_(list(weights.values()), largest, foreach=None)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    value = float(norm)
    if not math.isfinite(value):
        raise ModelError("gradient norm", value, "finite; the step was not taken")
    return value
