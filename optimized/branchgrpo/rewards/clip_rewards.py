"""Rewards that are a cosine between image and prompt: HPS v2.1, PickScore, CLIP score."""

from pathlib import Path
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.base import ImageScorer
from branchgrpo.rewards.clip_encoder import ClipEncoder
from branchgrpo.rewards.images import Images
from branchgrpo.rewards.open_clip_keys import VIT_H_14, OpenClipShape
from branchgrpo.rewards.preprocess import Preprocess

HPS_CHECKPOINT = "xswu/HPSv2:HPS_v2.1_compressed.pt"
HPS_TOKENIZER = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
PICK_MODEL = "yuvalkirstain/PickScore_v1"
CLIP_MODEL = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
PUBLISHED_LOGIT_SCALE = 100.0
"""What published PickScore tables divide by, so that their values lie near the cosine (0.22 … 0.24)."""


class ClipReward(ImageScorer):
    """scale · cos(image, prompt)."""

    def __init__(self, name: str, encoder: ClipEncoder, scale: float = 1.0) -> None:
        self.name = name
        self.encoder = encoder
        self.scale = scale
        self.version = encoder.version
        self.range = (-scale, scale)

    def score(self, images: Images, prompts: tuple[Prompt, ...]) -> Float[Tensor, "items"]:
        """Row-wise inner product of the unit embeddings."""
        pictures = self.encoder.images(images)
        texts = self.encoder.texts([prompt.text for prompt in prompts])
        return self.scale * (pictures.double() * texts.double()).sum(dim=-1)


class HPSv21(ClipReward):
    """Human preference score v2.1: cosine of a ViT-H/14 CLIP fine-tuned on preferences.

    Formula: cos(f(image), g(prompt)), the image scaled by its longest side and padded with zeros.
    Source: HPS v2 (arXiv 2306.09341) and its v2.1 checkpoint.
    """

    @classmethod
    def load(
        cls,
        checkpoint: str | Path = HPS_CHECKPOINT,
        tokenizer: str | Path = HPS_TOKENIZER,
        *,
        shape: OpenClipShape = VIT_H_14,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        chunk: int = 64,
    ) -> Self:
        """From ``HPS_v2.1_compressed.pt``, local or on the hub.

        Args:
            checkpoint: file, or owner/name:file.
            tokenizer: open_clip's merges file, a folder, or a hub id.
            shape: sizes of the network; ViT-H-14 for the published checkpoint.
            device, dtype: of the network.
            chunk: images or texts in one forward pass.
        """
        encoder = ClipEncoder.from_open_clip(
            checkpoint,
            tokenizer,
            shape=shape,
            preprocess=Preprocess(shape.image_size, "longest_pad"),
            device=device,
            dtype=dtype,
            chunk=chunk,
        )
        return cls("hps_v2.1", encoder)


class PickScore(ClipReward):
    """PickScore: exp(logit scale)/100 · cos of a ViT-H/14 CLIP fine-tuned on choices.

    Source: Pick-a-Pic (arXiv 2305.01569); the division by 100 is that of published tables.
    """

    @classmethod
    def load(
        cls,
        source: str | Path = PICK_MODEL,
        tokenizer: str | Path | None = CLIP_MODEL,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        chunk: int = 64,
    ) -> Self:
        """From a folder or hub id; the published model takes its tokenizer from the CLIP that it was tuned from."""
        words = source if tokenizer is None else tokenizer
        encoder = ClipEncoder.from_transformers(source, words, device=device, dtype=dtype, chunk=chunk)
        return cls("pickscore", encoder, encoder.logit_scale / PUBLISHED_LOGIT_SCALE)


class ClipScore(ClipReward):
    """CLIP score: the plain cosine (no scale of 2.5, no clipping at 0), as the papers' tables print it."""

    @classmethod
    def load(
        cls,
        source: str | Path = CLIP_MODEL,
        tokenizer: str | Path | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        chunk: int = 64,
    ) -> Self:
        """From a folder or hub id of a ``transformers.CLIPModel``."""
        words = source if tokenizer is None else tokenizer
        encoder = ClipEncoder.from_transformers(source, words, device=device, dtype=dtype, chunk=chunk)
        return cls("clip", encoder)
