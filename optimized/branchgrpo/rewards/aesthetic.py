"""LAION's aesthetic score: a linear head on a unit CLIP image embedding; the prompt plays no part."""

import math
from pathlib import Path
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.base import ImageScorer
from branchgrpo.rewards.checkpoint import find_checkpoint, fingerprint, read_state_dict
from branchgrpo.rewards.clip_encoder import ClipEncoder
from branchgrpo.rewards.images import Images
from branchgrpo.rewards.linear_head import LinearHead

AESTHETIC_CLIP = "openai/clip-vit-large-patch14"


class AestheticScore(ImageScorer):
    """head(f(image)/‖f(image)‖), about 1 … 10.

    Source: the improved aesthetic predictor, ``sac+logos+ava1-l14-linearMSE.pth`` on CLIP ViT-L/14.
    """

    range = (-math.inf, math.inf)

    def __init__(self, encoder: ClipEncoder, head: LinearHead, version: str) -> None:
        self.name = "aesthetic"
        self.encoder = encoder
        self.head = head.to(encoder.model.device).eval()
        self.version = version

    @classmethod
    def load(
        cls,
        head: str | Path,
        source: str | Path = AESTHETIC_CLIP,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        chunk: int = 64,
    ) -> Self:
        """From the head's checkpoint and a CLIP folder or hub id.

        Raises:
            InputError: a head with other layers, such as the variant with activations.
        """
        path = find_checkpoint(head)
        encoder = ClipEncoder.from_transformers(source, None, device=device, dtype=dtype, chunk=chunk)
        layers = LinearHead(path.name, read_state_dict(path), encoder.model.config.projection_dim)
        return cls(encoder, layers, f"{path.name} {fingerprint(path)} on {encoder.version}")

    def score(self, images: Images, prompts: tuple[Prompt, ...]) -> Float[Tensor, "items"]:
        """The head on the unit embedding, in float32."""
        scores: Tensor = self.head(self.encoder.images(images))
        return scores
