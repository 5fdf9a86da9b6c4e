"""How images reach a vision encoder: resize, pad or crop, normalise."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from branchgrpo.reference.errors import InputError, is_integer
from branchgrpo.reference.options import check_choice
from branchgrpo.rewards.images import Images

Fit = Literal["longest_pad", "shortest_crop"]
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
LEVELS = 255.0
"""Steps of an 8-bit channel."""


@dataclass(frozen=True)
class Preprocess:
    """Resize, pad or crop to a square, then (x − mean) / std a channel.

    Attributes:
        size: side of the square, ≥ 1.
        fit: ``longest_pad`` (HPS v2.x) scales the longest side to ``size`` and pads with zeros, the odd pixel to the
            right and below; ``shortest_crop`` (CLIP) scales the shortest side to ``size`` and crops the centre.
        quantise: round to 8 bits before and after the resize and clamp to [0, 1], as a pipeline over 8-bit images
            does (CLIP, PickScore, ImageReward, aesthetic); without it the resize is done in floating point (HPS).
        mean, std: of the three channels.
    """

    size: int = 224
    fit: Fit = "shortest_crop"
    quantise: bool = False
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD

    def __post_init__(self) -> None:
        if not is_integer(self.size) or self.size < 1:
            raise InputError("preprocess.size", self.size, "an integer ≥ 1")
        check_choice("preprocess.fit", self.fit, get_args(Fit))

    def __call__(self, images: Images) -> Float[Tensor, "items 3 size size"]:
        """Pixels for the encoder, float32 (float64 stays)."""
        x = images.pixels if images.pixels.dtype == torch.float64 else images.pixels.float()
        x = to_levels(x) if self.quantise else x
        x = pad_longest(x, self.size, self.quantise) if self.fit == "longest_pad" else crop(x, self.size, self.quantise)
        mean = torch.tensor(self.mean, dtype=x.dtype, device=x.device).view(3, 1, 1)
        std = torch.tensor(self.std, dtype=x.dtype, device=x.device).view(3, 1, 1)
        return (x - mean) / std


def to_levels(x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Clamp to [0, 1] and round to 8 bits."""
    return (x.clamp(0.0, 1.0) * LEVELS).round() / LEVELS


def resize(
    x: Float[Tensor, "items 3 h w"], height: int, width: int, quantise: bool
) -> Float[Tensor, "items 3 height width"]:
    """Bicubic (a = −½) with the kernel widened when shrinking; the same size is left as it is.

    With ``quantise`` the rows are resized first and rounded to 8 bits, then the columns, as Pillow does.
    """
    if x.shape[-2:] == (height, width):
        return x
    if not quantise:
        return bicubic(x, height, width)
    return to_levels(bicubic(to_levels(bicubic(x, x.shape[-2], width)), height, width))


def bicubic(x: Float[Tensor, "items 3 h w"], height: int, width: int) -> Float[Tensor, "items 3 height width"]:
    """Antialiased cubic resize in floating point."""
    return functional.interpolate(x, size=(height, width), mode="bicubic", align_corners=False, antialias=True)


def pad_longest(x: Float[Tensor, "items 3 h w"], size: int, quantise: bool) -> Float[Tensor, "items 3 size size"]:
    """Scale the longest side to ``size`` and pad with zeros to a square.

    An image whose longest side already is ``size`` is padded too; the published HPS code leaves it unpadded, which its
    own model then refuses.

    Raises:
        InputError: an aspect ratio at which the short side would vanish.
    """
    h, w = x.shape[-2:]
    scale = size / float(max(h, w))
    height, width = round(h * scale), round(w * scale)
    if min(height, width) < 1:
        raise InputError("samples: (height, width)", (h, w), f"of an aspect ratio below {2 * size}")
    x = resize(x, height, width, quantise)
    rows, columns = size - height, size - width
    return functional.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))


def crop(x: Float[Tensor, "items 3 h w"], size: int, quantise: bool) -> Float[Tensor, "items 3 size size"]:
    """Scale the shortest side to ``size`` and crop the centre."""
    h, w = x.shape[-2:]
    short = min(h, w)
    height, width = (size * h // short, size * w // short) if short != size else (h, w)
    x = resize(x, height, width, quantise)
    top, left = round((height - size) / 2.0), round((width - size) / 2.0)
    return x[..., top : top + size, left : left + size]
