"""Sizes that a network and its VAE can take."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from branchgrpo.reference.errors import InputError, is_integer


def check_latent(shape: Sequence[int], channels: tuple[int, ...], multiples: tuple[int, ...]) -> None:
    """Raise ``InputError`` unless a latent has the right channels and dimensions, each a multiple.

    Args:
        shape: ``[channels, *sides]``.
        channels: the number of channels, alone.
        multiples: what each side is a multiple of.
    """
    legal = f"({channels[0]}, " + ", ".join(f"{m}·n" for m in multiples) + ") with n ≥ 1"
    sides = tuple(shape[1:])
    fits = len(sides) == len(multiples) and tuple(shape[:1]) == channels
    if not fits or any(n < 1 or n % m for n, m in zip(sides, multiples, strict=True)):
        raise InputError("latent_shape", tuple(shape), legal)


def check_pixels(height: int, width: int, multiple: tuple[int, int]) -> None:
    """Raise ``InputError`` unless both sides are positive multiples of what network and VAE need together."""
    for name, value, factor in (("height", height, multiple[0]), ("width", width, multiple[1])):
        if not is_integer(value) or value < 1 or value % factor:
            raise InputError(name, value, f"a positive multiple of {factor}")


def image_latent_shape(
    channels: int, height: int, width: int, frames: int, factor: int, patch: int
) -> tuple[int, int, int]:
    """``[channels, height, width]`` of an image's latent.

    Raises:
        InputError: a side that is not a multiple of factor·patch, or more than one frame.
    """
    if frames != 1:
        raise InputError("frames", frames, "1 for a model of images")
    check_pixels(height, width, (factor * patch, factor * patch))
    return channels, height // factor, width // factor


def divided(outputs: Any) -> Tensor:
    """The sample of a VAE's tuple."""
    sample: Tensor = outputs[0]
    return sample
