"""Tiny real pipelines with random weights, built offline, saved to a folder and loaded from it."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from branchgrpo.models.tiny.image_pipelines import flux, qwen_image, stable_diffusion_3
from branchgrpo.models.tiny.tokenizers import SENTENCES
from branchgrpo.models.tiny.video_pipelines import wan
from branchgrpo.reference.protocols import Guidance

PROMPTS, NEGATIVE = SENTENCES[:3], SENTENCES[3]


@dataclass(frozen=True)
class Row:
    """A backbone under test: a new one adds its row here, and every test of every backbone runs on it.

    Attributes:
        build: makes the tiny pipeline.
        guidance: the guidance of the shared tests.
        call: that guidance in the words of the pipeline's call.
        size: (frames, height, width) in pixels.
        image: whether it starts from an image.
        slow: whether its long tests are left out of the quick run.
        variant: only a variant of another row: kept for parity alone.
    """

    build: Callable[[], DiffusionPipeline]
    guidance: Guidance
    call: dict[str, object]
    size: tuple[int, int, int] = (1, 16, 24)
    image: bool = False
    slow: bool = False
    variant: bool = False


def guided(scale: float) -> Guidance:
    return Guidance("classifier_free", scale)


CFG = {"guidance_scale": 3.0, "negative_prompt": NEGATIVE}
VIDEO = (5, 16, 32)
ROWS = {
    "flux": Row(flux, Guidance("embedded", 3.0), {"guidance_scale": 3.0}),
    "flux-schnell": Row(lambda: flux(guidance_embeds=False), Guidance(), {}, variant=True),
    "sd3": Row(stable_diffusion_3, guided(3.0), CFG),
    "sd3.5": Row(lambda: stable_diffusion_3(v35=True), guided(3.0), CFG, variant=True),
    "sd3-no-t5": Row(lambda: stable_diffusion_3(with_t5=False), guided(3.0), CFG, variant=True),
    "qwen": Row(qwen_image, guided(3.0), {"true_cfg_scale": 3.0, "negative_prompt": NEGATIVE}),
    "wan2.1": Row(wan, guided(3.0), CFG, VIDEO),
    "wan2.2": Row(lambda: wan(experts=True), guided(3.0), CFG, VIDEO),
    "wan2.2-5b": Row(lambda: wan(expand=True), guided(3.0), CFG, VIDEO, slow=True),
    "wan2.1-i2v": Row(lambda: wan(image=True), guided(3.0), CFG, VIDEO, image=True, slow=True),
    "wan2.2-i2v": Row(lambda: wan(image=True, experts=True), guided(3.0), CFG, VIDEO, image=True, variant=True),
    "wan2.2-5b-i2v": Row(lambda: wan(image=True, expand=True), guided(3.0), CFG, VIDEO, image=True, slow=True),
}
KINDS = [kind for kind, row in ROWS.items() if not row.variant]
QUICK = [pytest.param(kind, marks=pytest.mark.slow) if ROWS[kind].slow else kind for kind in KINDS]


def saved(kind: str, root: Path) -> Path:
    """The folder of a tiny pipeline, built on the first request."""
    folder = root / kind
    if not folder.exists():
        ROWS[kind].build().save_pretrained(folder)
    return folder


def image(seed: int = 0, size: tuple[int, int] = (40, 56)) -> Image.Image:
    """A picture with structure of its own."""
    noise = torch.rand(size[0] // 8, size[1] // 8, 3, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray((255 * noise).byte().numpy()).resize(size[::-1])


def first_frames(kind: str, size: tuple[int, int, int], count: int) -> dict[str, object]:
    """The arguments that ``encode`` needs besides the prompts."""
    return {"images": [image(i) for i in range(count)], "size": size} if ROWS[kind].image else {}


@contextmanager
def no_network() -> Iterator[None]:
    """Every attempt to open a connection or to resolve a name raises."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("reached for the network")

    kept = socket.socket.connect, socket.getaddrinfo
    socket.socket.connect, socket.getaddrinfo = refuse, refuse
    try:
        yield
    finally:
        socket.socket.connect, socket.getaddrinfo = kept
