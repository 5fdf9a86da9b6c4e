"""Sample grids on disk: a PNG an evaluation, a GIF beside it for videos, and the prompts in a JSON file of its own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from branchgrpo.training.logs.pictures import Thumbnails

GAP = 4
"""White pixels around every picture."""
SMALL = 48
"""Pictures with a shorter side below this are enlarged by a whole number, pixel for pixel."""
FRAME_MS = 125
"""Duration of a frame in the GIF."""


def enlarge(picture: UInt8[Tensor, "frames height width 3"]) -> UInt8[Tensor, "frames tall wide 3"]:
    """The picture with every pixel repeated until its longest side is at least ``SMALL``."""
    factor = max(1, -(-SMALL // max(picture.shape[1:3])))
    return picture.repeat_interleave(factor, dim=1).repeat_interleave(factor, dim=2)


def frame_strip(picture: UInt8[Tensor, "frames height width 3"]) -> UInt8[Tensor, "height wide 3"]:
    """The frames of a video side by side; an image as it is."""
    return torch.cat(list(picture), dim=1)


def tiled(rows: Sequence[Sequence[Tensor]]) -> UInt8[Tensor, "height width 3"]:
    """Pictures ``[height, width, 3]`` on white, a row each; all have the size of the largest place."""
    height = max(picture.shape[0] for row in rows for picture in row) + GAP
    width = max(picture.shape[1] for row in rows for picture in row) + GAP
    columns = max(len(row) for row in rows)
    page = torch.full((height * len(rows) + GAP, width * columns + GAP, 3), 255, dtype=torch.uint8)
    for i, row in enumerate(rows):
        for j, picture in enumerate(row):
            top, left = i * height + GAP, j * width + GAP
            page[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    return page


def save_animation(rows: Sequence[Sequence[Tensor]], path: Path) -> None:
    """The grid as an animated GIF: all videos run at once, shorter ones stay at their last frame."""
    from PIL import Image

    frames = max(len(picture) for row in rows for picture in row)
    pages = [
        Image.fromarray(tiled([[picture[min(t, len(picture) - 1)] for picture in row] for row in rows]).numpy())
        for t in range(frames)
    ]
    pages[0].save(path, save_all=True, append_images=pages[1:], duration=FRAME_MS, loop=0)


def save_grid(
    pictures: Sequence[Thumbnails], prompts: Sequence[dict[str, Any]], folder: Path, iteration: int
) -> Path | None:
    """Write ``step-000050.png`` (a prompt a row; of a video its frames), ``.gif`` for videos, and ``.json``.

    Args:
        pictures: of each prompt's samples.
        prompts: what the JSON file says of each row: id, text, rewards.
        folder: made if missing.
        iteration: iterations done.

    Returns:
        The PNG; None where there are no pictures, and then nothing is written.
    """
    from PIL import Image

    if not pictures or not pictures[0]:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{iteration:06d}.png"
    rows = [[enlarge(picture) for picture in row] for row in pictures]
    video = any(len(picture) > 1 for row in rows for picture in row)
    if video:  # a video needs the width: one a row
        strips = [[frame_strip(picture)] for row in rows for picture in row]
        save_animation(rows, path.with_suffix(".gif"))
    else:
        strips = [[picture[0] for picture in row] for row in rows]
    Image.fromarray(tiled(strips).numpy()).save(path)
    about = {"iteration": iteration, "samples": len(rows[0]), "video": video, "rows": list(prompts[: len(rows)])}
    path.with_suffix(".json").write_text(json.dumps(about, ensure_ascii=False, indent=1), encoding="utf-8")
    return path
