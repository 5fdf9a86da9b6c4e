"""Folders of tiny pipelines, built once and kept in the project's cache."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from branchgrpo.models.cache_folder import cache_directory
from branchgrpo.models.tiny.image_pipelines import flux, qwen_image, stable_diffusion_3
from branchgrpo.models.tiny.parts import library
from branchgrpo.models.tiny.video_pipelines import wan
from branchgrpo.reference.errors import OptionError, is_integer


@dataclass(frozen=True)
class Tiny:
    """A tiny pipeline: its builder, which takes a seed, and the (frames, height, width) that it samples, in pixels."""

    build: Callable[..., Any]
    size: tuple[int, int, int]


TINY: dict[str, Tiny] = {
    "tiny-flux": Tiny(flux, (1, 16, 24)),
    "tiny-sd3": Tiny(stable_diffusion_3, (1, 16, 24)),
    "tiny-qwen-image": Tiny(qwen_image, (1, 16, 24)),
    "tiny-wan": Tiny(wan, (5, 16, 32)),
}
"""Name → pipeline."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of transformers, which are in the way of the caller's own output."""
    logging = library("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def tiny_key(name: str, seed: int) -> str:
    """A key that changes with the seed, this package's source and the libraries that build the pipeline."""
    sources = {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))}
    libraries = {package: version(package) for package in ("torch", "diffusers", "transformers", "tokenizers")}
    described = json.dumps([name, seed, sources, libraries], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def tiny_pipeline(name: str, seed: int = 0) -> Path:
    """The folder of a tiny pipeline with random weights, built without a network on the first request.

    A folder is complete or absent: it is built under another name and renamed; of several processes that build it at
    the same time the first wins, and all make the same.

    Args:
        name: one of ``TINY``.
        seed: of the weights.

    Raises:
        OptionError: an unknown name, a seed that is none, or a cache that is no directory.
    """
    if name not in TINY:
        raise OptionError("model.source", name, f"one of {', '.join(TINY)}")
    if not is_integer(seed) or not 0 <= seed < 2**32:
        raise OptionError("seed", seed, "an integer in 0..2^32 − 1")
    folder = cache_directory() / f"{name}-{tiny_key(name, seed)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        pipeline = TINY[name].build(seed)
        with quiet():
            pipeline.save_pretrained(building)
        os.chmod(building, 0o755)
        os.rename(building, folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder
