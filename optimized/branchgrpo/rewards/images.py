"""Images and videos as rewards take them: values checked once, so that a swapped argument is refused by type."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Prompt

IMAGE_LAYOUT = "a float tensor [items, 3, height, width] with values in [0, 1]"
VIDEO_LAYOUT = "a float tensor [items, frames, 3, height, width] with values in [0, 1]"


def check_pixels(value: object, dimensions: int, layout: str) -> Tensor:
    """The tensor itself, if it is a floating-point batch of RGB values in [0, 1].

    Raises:
        InputError: another type, rank, dtype, channel count, an empty side, or a value that is not in [0, 1]; for a
            value, the first item that has one is named.
    """
    if not isinstance(value, Tensor):
        raise InputError("samples", type(value).__name__, layout)
    if value.ndim != dimensions or value.shape[-3] != 3 or 0 in value.shape[1:]:
        raise InputError("samples: shape", tuple(value.shape), layout)
    if not value.is_floating_point():
        raise InputError("samples: dtype", value.dtype, layout)
    legal = ((value >= 0) & (value <= 1)).flatten(1).all(dim=1)
    for item in torch.nonzero(~legal).flatten().tolist():
        low, high = value[item].aminmax()
        raise InputError(f"samples[{item}]: (min, max)", (low.item(), high.item()), "finite and in [0, 1]")
    return value


@dataclass(frozen=True, eq=False)
class Images:
    """RGB images of one size, values in [0, 1] (REW-6)."""

    pixels: Float[Tensor, "items 3 height width"]

    def __post_init__(self) -> None:
        check_pixels(self.pixels, 4, IMAGE_LAYOUT)

    def __len__(self) -> int:
        return self.pixels.shape[0]

    def chunks(self, size: int) -> Iterator["Images"]:
        """The images in order, at most ``size`` at a time."""
        for start in range(0, len(self), size):
            yield Images(self.pixels[start : start + size])


@dataclass(frozen=True, eq=False)
class Videos:
    """RGB videos of one size and length, values in [0, 1] (REW-6)."""

    pixels: Float[Tensor, "items frames 3 height width"]

    def __post_init__(self) -> None:
        check_pixels(self.pixels, 5, VIDEO_LAYOUT)

    def __len__(self) -> int:
        return self.pixels.shape[0]

    def frames(self, count: int) -> Float[Tensor, "items count 3 height width"]:
        """``count`` frames spread evenly from the first to the last (all of them if there are fewer)."""
        total = self.pixels.shape[1]
        index = torch.linspace(0, total - 1, min(count, total)).round().long()
        return self.pixels[:, index.to(self.pixels.device)]


def as_images(value: object) -> Images:
    """``value`` as ``Images``.  Clause: REW-6.

    Raises:
        InputError: anything else than images, such as prompts in the place of images.
    """
    if isinstance(value, Images):
        return value
    check_pixels(value, 4, IMAGE_LAYOUT)
    assert isinstance(value, Tensor)
    return Images(value)


def as_videos(value: object) -> Videos:
    """``value`` as ``Videos``.  Clause: REW-6.

    Raises:
        InputError: anything else than videos.
    """
    if isinstance(value, Videos):
        return value
    check_pixels(value, 5, VIDEO_LAYOUT)
    assert isinstance(value, Tensor)
    return Videos(value)


def as_prompts(value: object, items: int) -> tuple[Prompt, ...]:
    """``value`` as one prompt an item.  Clause: REW-3, REW-6.

    Raises:
        InputError: anything else than a sequence of ``items`` prompts, such as images in the place of prompts.
    """
    if isinstance(value, str | Tensor) or not isinstance(value, Sequence):
        raise InputError("prompts", type(value).__name__, "a sequence of Prompt")
    for i, prompt in enumerate(value):
        if not isinstance(prompt, Prompt):
            raise InputError(f"prompts[{i}]", type(prompt).__name__, "a Prompt")
    if len(value) != items:
        raise InputError("len(prompts)", len(value), f"{items}, one an item")
    return tuple(value)
