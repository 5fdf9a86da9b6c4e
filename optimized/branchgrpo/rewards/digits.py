"""A bounded reward for handwritten digits: a target stroke weight plus the log-probability of the right digit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.reference.protocols import Prompt

PIXELS = 64
VERSION = "1"


class DigitClassifier(nn.Module):
    """A small convolutional network: 8×8 images in [−1, 1] to ten logits, every item on its own."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(8 * channels, 10),
        )

    def forward(self, images: Float[Tensor, "items 1 8 8"]) -> Float[Tensor, "items 10"]:
        """Logits of every image, in the parameters' dtype."""
        logits: Tensor = self.layers(images)
        return logits


@dataclass(frozen=True)
class DigitsRewardConfig:
    """Target, factors and bound of the reward.

    Attributes:
        target_weight: wanted stroke weight in [0, 1]; the images' own mean is 0.24.
        stroke_factor: factor ≥ 0 of the distance to the target.
        digit_factor: factor ≥ 0 of log p(digit).
        floor: lower bound < 0 of the reward; the upper bound is 0.
    """

    target_weight: float = 0.30
    stroke_factor: float = 20.0
    digit_factor: float = 0.3
    floor: float = -10.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise OptionError(f"digits_reward.{name}", value, "a number")
        if not 0.0 <= self.target_weight <= 1.0:
            raise OptionError("digits_reward.target_weight", self.target_weight, "in [0, 1]")
        for name in ("stroke_factor", "digit_factor"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0.0):
                raise OptionError(f"digits_reward.{name}", getattr(self, name), "finite and ≥ 0")
        if not (math.isfinite(self.floor) and self.floor < 0.0):
            raise OptionError("digits_reward.floor", self.floor, "finite and < 0")


def as_images(samples: Float[Tensor, "items *sample"]) -> Float[Tensor, "items 1 8 8"]:
    """Samples as images, pixels limited to [−1, 1], what a screen would show: values beyond it earn nothing.

    Raises:
        InputError: a sample that is not 64 pixels.
    """
    if samples.ndim < 2 or math.prod(samples.shape[1:]) != PIXELS:
        raise InputError("samples.shape", tuple(samples.shape), f"[items, …] with {PIXELS} pixels an item")
    return samples.reshape(-1, 1, 8, 8).clamp(-1.0, 1.0)


def stroke_weight(samples: Float[Tensor, "items *sample"]) -> Float64[Tensor, "items"]:
    """Stroke weight of every sample in [0, 1]: the mean square of its pixels' darkness (x + 1)/2.

    The square makes dark pixels count: with the plain mean, a grey haze around a thin stroke is the cheapest way up.
    """
    darkness = (as_images(samples).double().flatten(1) + 1.0) / 2.0
    return darkness.square().mean(dim=1)


class DigitsReward:
    """r = max(floor, −a · |stroke weight − target| + b · log p(digit)), in [floor, 0]: a ``RewardModel`` (REW-1).

    A stroke weight without a target, or a classifier alone, is easily hacked: the target makes both directions cost,
    the bound keeps one bad sample from ruling its group, and a judge of another family and other images watches.
    """

    name = "digits"

    def __init__(self, classifier: DigitClassifier, config: DigitsRewardConfig | None = None) -> None:
        self.config = config or DigitsRewardConfig()
        self.classifier = classifier.eval().requires_grad_(False)
        self.version = VERSION
        self.range = (self.config.floor, 0.0)

    @torch.no_grad()
    def __call__(self, samples: Float[Tensor, "items *sample"], prompts: Sequence[Prompt]) -> Float64[Tensor, "items"]:
        """Rewards of ``samples``, sample i judged as the digit that ``prompts[i]`` names.

        Clause: REW-1.  A NaN stays a NaN, for the caller's check to name the leaf (REW-2).

        Raises:
            InputError: samples that are not 64 pixels, another number of prompts, a text that is no digit.
        """
        images = as_images(samples)
        if len(prompts) != images.shape[0]:
            raise InputError("len(prompts)", len(prompts), f"{images.shape[0]}, one a sample")
        digits = torch.tensor([digit_of(prompt) for prompt in prompts], dtype=torch.int64, device=images.device)
        weight = next(self.classifier.parameters())
        logits = self.classifier(images.to(weight.device, weight.dtype)).to(images.device)
        log_p = logits.double().log_softmax(dim=1).gather(1, digits[:, None]).squeeze(1)
        distance = (stroke_weight(samples) - self.config.target_weight).abs()
        reward = self.config.digit_factor * log_p - self.config.stroke_factor * distance
        bounded: Tensor = reward.clamp(min=self.config.floor)
        return bounded


def digit_of(prompt: Prompt) -> int:
    """The digit that a prompt's text names.

    Raises:
        InputError: a text that is not one of "0" … "9".
    """
    text = prompt.text.strip()
    if len(text) != 1 or text not in "0123456789":
        raise InputError(f"text of prompt {prompt.id}", prompt.text, 'one digit, "0" … "9"')
    return int(text)
