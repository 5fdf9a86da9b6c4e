"""Preprocessing against an independent bicubic resize and against Pillow, for odd sizes and aspect ratios."""

import math

import jaxtyping
import numpy as np
import pytest
import torch
from helpers_rewards import pictures
from PIL import Image

from branchgrpo.reference.errors import BranchGRPOError
from branchgrpo.rewards.images import Images
from branchgrpo.rewards.preprocess import CLIP_MEAN, CLIP_STD, Preprocess

SIZES = [(28, 28), (31, 17), (17, 31), (64, 48), (101, 100), (20, 9), (90, 11), (28, 27)]
ROUNDING = 1e-5
"""The kernel's centre, up to 100, is known to 4e-6 in float32 and its slope is at most about one."""


def cubic(t: float) -> float:
    """Keys' kernel with a = −1/2."""
    t = abs(t)
    if t < 1:
        return 1.5 * t**3 - 2.5 * t**2 + 1
    return -0.5 * t**3 + 2.5 * t**2 - 4 * t + 2 if t < 2 else 0.0


def weights(source: int, target: int) -> np.ndarray:
    """Rows of an antialiased cubic resize, from the definition."""
    scale = source / target
    width = max(scale, 1.0)
    matrix = np.zeros((target, source))
    for i in range(target):
        centre = (i + 0.5) * scale
        low = max(0, int(centre - 2 * width + 0.5))
        high = min(source, int(centre + 2 * width + 0.5))
        for j in range(low, high):
            matrix[i, j] = cubic((j - centre + 0.5) / width)
    return matrix / matrix.sum(axis=1, keepdims=True)


def longest_pad(x: np.ndarray, size: int) -> np.ndarray:
    """HPS's geometry written down again: longest side, zeros around, the odd row below and the odd column right."""
    _, h, w = x.shape
    new_h, new_w = round(h * size / max(h, w)), round(w * size / max(h, w))
    small = np.einsum("ih,chw,jw->cij", weights(h, new_h), x, weights(w, new_w))
    canvas = np.zeros((3, size, size))
    top, left = (size - new_h) // 2, (size - new_w) // 2
    canvas[:, top : top + new_h, left : left + new_w] = small
    return canvas


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("size", [28, 50])
def test_longest_side_and_padding(height: int, width: int, size: int) -> None:
    x = pictures(2, height, width)
    mean, std = (np.array(v).reshape(3, 1, 1) for v in (CLIP_MEAN, CLIP_STD))
    found = Preprocess(size, "longest_pad")(Images(x)).numpy()
    for i in range(2):
        expected = (longest_pad(x[i].double().numpy(), size) - mean) / std
        assert np.abs(found[i] - expected).max() < ROUNDING / min(CLIP_STD)


def test_an_image_that_would_vanish_is_refused() -> None:
    with pytest.raises(BranchGRPOError, match="aspect ratio"):
        Preprocess(28, "longest_pad")(Images(torch.zeros(1, 3, 1, 300)))


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_crop_equals_pillow_to_one_level(height: int, width: int) -> None:
    """Pillow resizes 8-bit images in fixed point, one axis after the other: it differs by one of 255 levels at most."""
    size = 24
    x = pictures(1, height, width, seed=3)
    found = Preprocess(size, "shortest_crop", quantise=True, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))(Images(x))[0]
    scale = size / min(height, width)
    new_h, new_w = (size, int(width * scale + 1e-9)) if height <= width else (int(height * scale + 1e-9), size)
    image = Image.fromarray((x[0] * 255).round().byte().permute(1, 2, 0).numpy())
    small = np.asarray(image.resize((new_w, new_h), Image.Resampling.BICUBIC))
    top, left = round((new_h - size) / 2), round((new_w - size) / 2)
    expected = small[top : top + size, left : left + size].transpose(2, 0, 1)
    gap = np.abs(found.numpy() * 255 - expected.astype(float))
    assert gap.max() < 1.001
    assert (gap > 0.5).mean() < 0.05


def test_quantise_clamps_the_overshoot_of_the_cubic_kernel() -> None:
    edge = torch.zeros(1, 3, 8, 8)
    edge[..., 4:] = 1.0
    zero, one = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    plain, quantised = (Preprocess(32, quantise=q, mean=zero, std=one)(Images(edge)) for q in (False, True))
    assert plain.max() > 1.0
    assert plain.min() < 0.0
    assert quantised.max() == 1.0
    assert quantised.min() == 0.0
    levels = quantised * 255
    assert torch.allclose(levels, levels.round(), atol=1e-4)


def test_options_are_checked() -> None:
    with pytest.raises((BranchGRPOError, jaxtyping.TypeCheckError)):  # the type checker of the test run comes first
        Preprocess(8, "stretch")  # type: ignore[arg-type]
    with pytest.raises(BranchGRPOError, match="size"):
        Preprocess(0)
    assert math.isclose(Preprocess(8).mean[0], 0.48145466)
