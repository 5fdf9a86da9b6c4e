"""ImageReward: BLIP reads the prompt while attending to the image, a linear head scores its first token."""

import math
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.errors import InputError, is_integer
from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.base import ImageScorer
from branchgrpo.rewards.blip_keys import BlipShape, blip_configs, convert_image_reward
from branchgrpo.rewards.checkpoint import find_checkpoint, fingerprint, read_state_dict, transformers_version
from branchgrpo.rewards.extras import require
from branchgrpo.rewards.images import Images
from branchgrpo.rewards.linear_head import LinearHead
from branchgrpo.rewards.preprocess import Preprocess

IMAGE_REWARD_CHECKPOINT = "THUDM/ImageReward:ImageReward.pt"
IMAGE_REWARD_TOKENIZER = "bert-base-uncased"
MEAN = 0.16717362830052426
STD = 1.0333394966054072
"""Mean and spread of the raw score over the authors' data, by which the published score is standardised."""

TEXT_LENGTH = 35
"""Tokens of the prompt that the published model reads."""


class ImageReward(ImageScorer):
    """(head(BLIP(prompt | image)) − mean) / std, unbounded, about −2 … 2.

    Source: ImageReward (arXiv 2304.05977).
    """

    range = (-math.inf, math.inf)

    def __init__(
        self, vision: Any, text: Any, head: LinearHead, tokenizer: Any, size: int, version: str, chunk: int = 32
    ) -> None:
        if not is_integer(chunk) or chunk < 1:
            raise InputError("chunk", chunk, "an integer ≥ 1")
        self.name = "image_reward"
        self.version = version
        self.vision = vision.eval().requires_grad_(False)
        self.text = text.eval().requires_grad_(False)
        self.head = head.eval()
        self.tokenizer = tokenizer
        self.preprocess = Preprocess(size, "shortest_crop", quantise=True)
        self.chunk = chunk

    @classmethod
    def load(
        cls,
        checkpoint: str | Path = IMAGE_REWARD_CHECKPOINT,
        tokenizer: str | Path = IMAGE_REWARD_TOKENIZER,
        *,
        shape: BlipShape | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        chunk: int = 32,
    ) -> Self:
        """From ``ImageReward.pt``, local or on the hub, and a BERT tokenizer's folder or hub id.

        Raises:
            InputError: a tensor that is missing, unknown or of another shape.
        """
        library = require("transformers", "rewards")
        sizes = BlipShape() if shape is None else shape
        path = find_checkpoint(checkpoint)
        vision_state, text_state, head_state = convert_image_reward(path.name, read_state_dict(path), sizes)
        vision_config, text_config = blip_configs(sizes)
        vision = library.BlipVisionModel(vision_config)
        text = library.BlipTextModel(text_config, add_pooling_layer=False)
        vision.load_state_dict(vision_state, strict=True)
        text.load_state_dict(text_state, strict=True)
        head = LinearHead(path.name, head_state, sizes.text_width).to(device)
        return cls(
            vision.to(device, dtype),
            text.to(device, dtype),
            head,
            library.AutoTokenizer.from_pretrained(str(tokenizer)),
            sizes.image_size,
            f"{path.name} {fingerprint(path)}, {transformers_version()}",
            chunk,
        )

    def score(self, images: Images, prompts: tuple[Prompt, ...]) -> Float[Tensor, "items"]:
        """Scores in chunks, each image with its own prompt."""
        texts = [prompt.text for prompt in prompts]
        starts = range(0, len(texts), self.chunk)
        parts = zip(starts, images.chunks(self.chunk), strict=True)
        return torch.cat([self.score_chunk(part, texts[i : i + self.chunk]) for i, part in parts])

    def score_chunk(self, images: Images, texts: list[str]) -> Float[Tensor, "items"]:
        """One forward pass; the head runs in float32."""
        device, dtype = self.vision.device, self.vision.dtype
        tokens = self.tokenizer(
            texts, padding="max_length", truncation=True, max_length=TEXT_LENGTH, return_tensors="pt"
        ).to(device)
        pixels = self.preprocess(images).to(device, dtype)
        seen = self.vision(pixel_values=pixels).last_hidden_state
        read = self.text(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask,
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:-1], dtype=torch.long, device=device),
        ).last_hidden_state
        raw: Tensor = self.head(read[:, 0].float())
        return (raw - MEAN) / STD
