"""Rewards that look at pixels only: no weights, no network, any image or video; for trying out a run."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.images import IMAGE_LAYOUT, VIDEO_LAYOUT, check_pixels

GREY = (0.5, 0.5, 0.5)


def colours(samples: Tensor, prompts: Sequence[Prompt]) -> Float64[Tensor, "items 3 pixels"]:
    """The pixels of every image, or of all frames of a video, by colour.

    Raises:
        InputError: no images or videos, or another number of prompts.
    """
    video = samples.ndim == 5
    pixels = check_pixels(samples, 5 if video else 4, VIDEO_LAYOUT if video else IMAGE_LAYOUT)
    if len(prompts) != len(pixels):
        raise InputError("len(prompts)", len(prompts), f"{len(pixels)}, one an item")
    return (pixels.transpose(1, 2) if video else pixels).double().flatten(2)


class ColourReward:
    """r = −‖mean colour − target‖², in [−3, 0]."""

    name = "colour"
    version = "1"
    range = (-3.0, 0.0)

    def __init__(self, target: Sequence[float] = GREY) -> None:
        """Ask for a mean colour.

        Args:
            target: red, green and blue in [0, 1].

        Raises:
            OptionError: another target.
        """
        if len(target) != 3 or not all(math.isfinite(part) and 0.0 <= part <= 1.0 for part in target):
            raise OptionError("colour.target", tuple(target), "three numbers in [0, 1]")
        self.target = torch.tensor(tuple(target), dtype=torch.float64)

    def __call__(self, samples: Tensor, prompts: Sequence[Prompt]) -> Float64[Tensor, "items"]:
        """One real a sample; the prompt plays no part."""
        means = colours(samples, prompts).mean(dim=2)
        return -(means - self.target.to(means.device)).square().sum(dim=1)


class ContrastReward:
    """r = the standard deviation of the pixels' values, all colours together, in [0, ½]."""

    name = "contrast"
    version = "1"
    range = (0.0, 0.5)

    def __call__(self, samples: Tensor, prompts: Sequence[Prompt]) -> Float64[Tensor, "items"]:
        """One real a sample; the prompt plays no part."""
        return colours(samples, prompts).flatten(1).std(dim=1, correction=0)
