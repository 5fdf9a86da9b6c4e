"""Sample grids over time, small enough to travel within the report."""

import base64
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from branchgrpo.training.logs.report.history import History

MOST = 6
"""Grids that a report shows, the first and the last among them."""
WIDTH = 1600
"""Pixels above which a grid is made smaller."""
LARGE = 400_000
"""Bytes above which a grid is stored as JPEG."""
ANIMATION = 8_000_000
"""Bytes up to which the last animation is put into the report."""


@dataclass(frozen=True)
class Sheet:
    """One sample grid.

    Attributes:
        iteration: iterations done.
        image: data URI; ``animation`` another one, or "".
        rows: id, text and rewards of every row of pictures.
        samples: a prompt.
        video: whether a row is a video.
        small: pixels are to be shown as squares.
    """

    iteration: int
    image: str
    animation: str
    rows: tuple[dict[str, Any], ...]
    samples: int
    video: bool
    small: bool


def data_uri(content: bytes, kind: str) -> str:
    """A ``data:`` address."""
    return f"data:image/{kind};base64," + base64.b64encode(content).decode("ascii")


def embedded(path: Path) -> tuple[str, bool]:
    """A grid as a data URI, made smaller where it is large, and whether it is small."""
    from PIL import Image

    content = path.read_bytes()
    with Image.open(path) as opened:
        width, height = opened.size
        if len(content) <= LARGE and width <= WIDTH:
            return data_uri(content, "png"), width <= WIDTH // 2
        page = opened.convert("RGB")
        if width > WIDTH:
            page = page.resize((WIDTH, max(1, round(height * WIDTH / width))), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        page.save(buffer, format="JPEG", quality=88)
        return data_uri(buffer.getvalue(), "jpeg"), False


def chosen(count: int, most: int = MOST) -> list[int]:
    """Indices of at most ``most`` of ``count`` things, evenly spread, the first and the last included."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def inside(folder: Path, name: str) -> Path | None:
    """The file ``name`` of a run's folder; None where it is missing, or not within the folder."""
    path = (folder / name).resolve()
    return path if path.is_relative_to(folder.resolve()) and path.is_file() else None


def sheets_of(history: History) -> list[Sheet]:
    """The sample grids of the run's evaluations, at most ``MOST``; files that are gone or damaged are left out."""
    paths = []
    for record in history.evaluations:
        path = inside(history.folder, str(record["grid"])) if record.get("grid") else None
        if path is not None:
            paths.append((record["iteration"], path))
    found = []
    for index in chosen(len(paths)):
        iteration, path = paths[index]
        about: dict[str, Any] = {"samples": 0, "video": False, "rows": []}
        try:
            if path.with_suffix(".json").is_file():
                about |= json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            image, small = embedded(path)
        except (OSError, ValueError):  # a full disk or a crash cut it off; the rest of the report stands
            continue
        moving = path.with_suffix(".gif")
        last = index == len(paths) - 1 and about["video"] and moving.is_file() and moving.stat().st_size <= ANIMATION
        animation = data_uri(moving.read_bytes(), "gif") if last else ""
        found.append(Sheet(iteration, image, animation, tuple(about["rows"]), about["samples"], about["video"], small))
    return found
