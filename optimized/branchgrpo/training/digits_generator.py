"""Pretraining of the digits generator: rectified flow with logit-normal times and an average of the weights."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from branchgrpo.models.digits import NULL_LABEL, DigitsConfig, DigitsVelocity
from branchgrpo.reference.errors import OptionError, is_integer
from branchgrpo.reference.protocols import TensorCondition
from branchgrpo.training.digits_data import DigitImages, SplitConfig

StepCallback = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


@dataclass(frozen=True)
class GeneratorConfig:
    """Everything that the generator's weights depend on.

    Attributes:
        network: size of the network.
        split: the cut of the data.
        seed: seed of initial weights, batches, times, noise and label dropout.
        steps: optimiser steps.
        batch: images a step, drawn with replacement.
        learning_rate: peak of the schedule (linear warm-up over 5 % of the steps, then a cosine to 0).
        decay: decay of the weights' moving average.
        label_dropout: probability of the null label, which classifier-free guidance needs.
    """

    network: DigitsConfig = field(default_factory=DigitsConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    seed: int = 0
    steps: int = 3000
    batch: int = 256
    learning_rate: float = 2e-3
    decay: float = 0.998
    label_dropout: float = 0.1

    def __post_init__(self) -> None:
        for name, low in (("seed", 0), ("steps", 1), ("batch", 1)):
            if not is_integer(getattr(self, name)) or getattr(self, name) < low:
                raise OptionError(f"generator.{name}", getattr(self, name), f"an integer ≥ {low}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise OptionError("generator.learning_rate", self.learning_rate, "finite and > 0")
        for name in ("decay", "label_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise OptionError(f"generator.{name}", getattr(self, name), "in [0, 1)")


def flow_matching_loss(
    model: DigitsVelocity, data: DigitImages, config: GeneratorConfig, generator: torch.Generator
) -> Float[Tensor, ""]:
    """E ‖v_θ(x_σ, σ, y) − (ε − x⁰)‖² on one batch, x_σ = (1 − σ) x⁰ + σ ε.

    Source: rectified flow (arXiv 2209.03003) Eq. 1; logit-normal σ as in SD3 (arXiv 2403.03206) §3.1.
    """
    rows = torch.randint(len(data), (config.batch,), generator=generator)
    clean, labels = data.images[rows], data.labels[rows]
    noise = torch.randn(clean.shape, generator=generator)
    sigma = torch.randn(config.batch, generator=generator).sigmoid()
    dropped = torch.rand(config.batch, generator=generator) < config.label_dropout
    condition = TensorCondition({"label": torch.where(dropped, NULL_LABEL, labels)})
    s = sigma.view(-1, 1, 1, 1)
    return nn.functional.mse_loss(model((1.0 - s) * clean + s * noise, sigma, condition), noise - clean)


def warm_cosine(step: int, steps: int) -> float:
    """Factor of the learning rate: linear over the first 5 % of the steps, then a cosine to 0."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1.0 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def seeded_network(config: GeneratorConfig) -> DigitsVelocity:
    """A network with initial weights by the seed, the global generator left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return DigitsVelocity(config.network)


def train_generator(config: GeneratorConfig, data: DigitImages, on_step: StepCallback | None = None) -> DigitsVelocity:
    """Train the generator on its third of the images.

    Args:
        config: what the weights depend on.
        data: the generator's images.
        on_step: told of progress.

    Returns:
        The averaged weights, in evaluation mode.
    """
    generator = torch.Generator().manual_seed(config.seed + 1)
    model = seeded_network(config)
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_cosine(step, config.steps))
    for step in range(config.steps):
        optimizer.zero_grad(set_to_none=True)
        flow_matching_loss(model, data, config, generator).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        decay = min(config.decay, (step + 1) / (step + 10))  # early steps count for less while the average is young
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1.0 - decay)
        if on_step is not None:
            on_step(step + 1, config.steps)
    return average.eval()
