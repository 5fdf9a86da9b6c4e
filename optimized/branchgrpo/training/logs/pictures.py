"""Samples as small pictures: what a sample grid shows, and what travels between ranks for it."""

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.nn import functional

from branchgrpo.rewards.scoring import Decode

SIDE = 256
"""Longest side of a thumbnail in pixels."""
FRAMES = 16
"""Most frames of a video's thumbnail, evenly spread."""

Thumbnails = list[Tensor]
"""Pictures of one prompt's samples, each ``[frames, height, width, 3]`` of bytes."""


def as_frames(samples: Tensor) -> Tensor | None:
    """Samples as ``[items, frames, 3, height, width]`` in [0, 1]; None where they are no pictures.

    RGB images ``[items, 3, H, W]`` and videos ``[items, F, 3, H, W]`` are in [0, 1] already (REW-6).  A single channel
    ``[items, 1, H, W]`` is ink in [−1, 1] on white paper, as the digits are.
    """
    if samples.ndim == 5 and samples.shape[2] == 3:
        index = torch.linspace(0, samples.shape[1] - 1, min(FRAMES, samples.shape[1])).round().long()
        return samples[:, index.to(samples.device)]
    if samples.ndim == 4 and samples.shape[1] == 3:
        return samples.unsqueeze(1)
    if samples.ndim == 4 and samples.shape[1] == 1:
        return ((1.0 - samples.float()) / 2.0).unsqueeze(1).expand(-1, -1, 3, -1, -1)
    return None


def thumbnail(frames: Tensor) -> UInt8[Tensor, "frames height width 3"]:
    """Frames ``[frames, 3, height, width]`` in [0, 1], made smaller where the longest side is above ``SIDE``."""
    height, width = frames.shape[-2:]
    scale = SIDE / max(height, width)
    ready = frames.float()
    if scale < 1.0:
        size = (max(1, round(height * scale)), max(1, round(width * scale)))
        ready = functional.interpolate(ready, size, mode="area")
    shades = (ready.nan_to_num(0.0).clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)
    return shades.permute(0, 2, 3, 1).contiguous().cpu()


class Recorder:
    """A ``Decode`` that keeps thumbnails of the first samples that pass through it."""

    def __init__(self, decode: Decode | None, wanted: int) -> None:
        self.decode, self.wanted = decode, wanted
        self.pictures: Thumbnails = []

    def __call__(self, latents: Tensor) -> Tensor:
        """Decode, and keep what is still wanted."""
        samples = latents if self.decode is None else self.decode(latents)
        missing = self.wanted - len(self.pictures)
        if missing > 0:
            frames = as_frames(samples[:missing])
            self.pictures += [] if frames is None else [thumbnail(item) for item in frames]
        return samples

    def rows(self, samples: int) -> list[Thumbnails]:
        """The thumbnails, ``samples`` a prompt."""
        return [self.pictures[i : i + samples] for i in range(0, len(self.pictures), samples)]
