"""Training of the reward's classifier on its third of the digits, with small shifts, turns and noise."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from branchgrpo.reference.errors import OptionError, is_integer
from branchgrpo.rewards.digits import DigitClassifier
from branchgrpo.training.digits_data import DigitImages, SplitConfig
from branchgrpo.training.digits_generator import StepCallback, warm_cosine


@dataclass(frozen=True)
class ClassifierConfig:
    """Everything that the classifier's weights depend on.

    Attributes:
        channels: channels of the first layers.
        split: the cut of the data.
        seed: seed of initial weights, batches and augmentation.
        steps: optimiser steps.
        batch: images a step.
        learning_rate: peak of the schedule.
        turn: largest rotation, radians.
        shift: largest shift, in pixels.
        noise: standard deviation of the pixel noise.
    """

    channels: int = 32
    split: SplitConfig = field(default_factory=SplitConfig)
    seed: int = 0
    steps: int = 900
    batch: int = 128
    learning_rate: float = 2e-3
    turn: float = 0.2
    shift: float = 0.7
    noise: float = 0.1

    def __post_init__(self) -> None:
        for name, low in (("channels", 1), ("seed", 0), ("steps", 1), ("batch", 1)):
            if not is_integer(getattr(self, name)) or getattr(self, name) < low:
                raise OptionError(f"classifier.{name}", getattr(self, name), f"an integer ≥ {low}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise OptionError("classifier.learning_rate", self.learning_rate, "finite and > 0")
        for name in ("turn", "shift", "noise"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0.0):
                raise OptionError(f"classifier.{name}", getattr(self, name), "finite and ≥ 0")


def augment(
    images: Float[Tensor, "items 1 8 8"], config: ClassifierConfig, generator: torch.Generator
) -> Float[Tensor, "items 1 8 8"]:
    """Each image turned, scaled by up to 10 %, shifted and made noisy, by its own random amounts."""
    items = images.shape[0]
    turn, scale, dx, dy = (2.0 * torch.rand(items, generator=generator) - 1.0 for _ in range(4))
    turn, scale = config.turn * turn, 1.0 + 0.1 * scale
    offset = config.shift * 2.0 / 8.0  # affine_grid's coordinates span 2 over the 8 pixels
    rows = [turn.cos() * scale, -turn.sin() * scale, offset * dx, turn.sin() * scale, turn.cos() * scale, offset * dy]
    grid = nn.functional.affine_grid(torch.stack(rows, dim=1).view(items, 2, 3), [items, 1, 8, 8], align_corners=False)
    moved = nn.functional.grid_sample(images + 1.0, grid, align_corners=False) - 1.0  # outside is background, −1
    return (moved + config.noise * torch.randn(moved.shape, generator=generator)).clamp(-1.0, 1.0)


def train_classifier(
    config: ClassifierConfig, data: DigitImages, on_step: StepCallback | None = None
) -> DigitClassifier:
    """Train the reward's classifier; returns it in evaluation mode.

    Args:
        config: what the weights depend on.
        data: the classifier's images.
        on_step: told of progress.
    """
    generator = torch.Generator().manual_seed(config.seed + 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # initial weights and dropout draw from the global generator
        model = DigitClassifier(config.channels).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_cosine(step, config.steps))
        for step in range(config.steps):
            rows = torch.randint(len(data), (config.batch,), generator=generator)
            logits = model(augment(data.images[rows], config, generator))
            loss = nn.functional.cross_entropy(logits, data.labels[rows], label_smoothing=0.05)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            if on_step is not None:
                on_step(step + 1, config.steps)
    return model.eval()
