"""CLIP's two towers as functions to unit vectors, each distinct text encoded once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.errors import InputError, is_integer
from branchgrpo.rewards.checkpoint import (
    find_checkpoint,
    fingerprint,
    read_state_dict,
    state_fingerprint,
    transformers_version,
)
from branchgrpo.rewards.extras import require
from branchgrpo.rewards.images import Images
from branchgrpo.rewards.open_clip_keys import VIT_H_14, OpenClipShape, clip_config, convert_open_clip
from branchgrpo.rewards.preprocess import Preprocess
from branchgrpo.rewards.tokenizer import ClipTokenizer, load_tokenizer


class ClipEncoder:
    """Image and text embeddings of unit length.

    Attributes:
        model: a ``transformers.CLIPModel`` in evaluation mode, its parameters frozen.
        tokenizer: its tokenizer; None where only images are embedded.
        preprocess: from images to its pixels.
        version: backend and fingerprint of the weights.
        chunk: images or texts in one forward pass.
    """

    def __init__(
        self, model: Any, tokenizer: ClipTokenizer | None, preprocess: Preprocess, version: str, chunk: int = 64
    ) -> None:
        if not is_integer(chunk) or chunk < 1:
            raise InputError("chunk", chunk, "an integer ≥ 1")
        text = model.config.text_config
        if tokenizer is not None and tokenizer.vocab_size != text.vocab_size:
            raise InputError(
                "tokenizer: entries", tokenizer.vocab_size, f"{text.vocab_size}, as the model's vocabulary"
            )
        if preprocess.size != model.config.vision_config.image_size:
            raise InputError("preprocess.size", preprocess.size, str(model.config.vision_config.image_size))
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.preprocess = preprocess
        self.version = version
        self.chunk = chunk

    @classmethod
    def from_open_clip(
        cls,
        checkpoint: str | Path,
        tokenizer: str | Path | None,
        *,
        shape: OpenClipShape = VIT_H_14,
        preprocess: Preprocess,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        chunk: int = 64,
    ) -> Self:
        """From an open_clip state dict, local or on the hub (HPS v2.x is one).

        Raises:
            InputError: a tensor that is missing, unknown or of another shape; a tokenizer of another vocabulary.
        """
        path = find_checkpoint(checkpoint)
        state = convert_open_clip(path.name, read_state_dict(path), shape)
        with torch.device("meta"):
            model = require("transformers", "rewards").CLIPModel(clip_config(shape))
        model.load_state_dict(state, strict=True, assign=True)
        fill_position_ids(model)
        tokens = None if tokenizer is None else load_tokenizer(tokenizer, shape.context_length, "open_clip")
        version = f"{path.name} {fingerprint(path)}, {transformers_version()}"
        return cls(model.to(device, dtype), tokens, preprocess, version, chunk)

    @classmethod
    def from_transformers(
        cls,
        source: str | Path,
        tokenizer: str | Path | None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        chunk: int = 64,
    ) -> Self:
        """From a folder or hub id of a ``transformers.CLIPModel``; without a tokenizer it embeds images only."""
        model = require("transformers", "rewards").CLIPModel.from_pretrained(str(source), dtype=dtype)
        model.to(device)
        length = model.config.text_config.max_position_embeddings
        tokens = None if tokenizer is None else load_tokenizer(tokenizer, length)
        preprocess = Preprocess(model.config.vision_config.image_size, "shortest_crop", quantise=True)
        version = f"{Path(source).name} {state_fingerprint(model.state_dict())}, {transformers_version()}"
        return cls(model, tokens, preprocess, version, chunk)

    @property
    def logit_scale(self) -> float:
        """exp of the learned log-scale."""
        return float(self.model.logit_scale.exp())

    def images(self, images: Images) -> Float[Tensor, "items embed"]:
        """Unit embeddings of images."""
        rows = [self.image_features(part) for part in images.chunks(self.chunk)]
        return unit(torch.cat(rows))

    def image_features(self, images: Images) -> Float[Tensor, "items embed"]:
        """Projected class token of one batch, not normalised."""
        pixels = self.preprocess(images).to(self.model.device, self.model.dtype)
        features: Tensor = self.model.get_image_features(pixel_values=pixels).pooler_output
        return features

    def texts(self, texts: Sequence[str]) -> Float[Tensor, "items embed"]:
        """Unit embeddings of texts; a text that occurs many times is encoded once.

        Raises:
            InputError: an encoder without a tokenizer.
        """
        distinct = list(dict.fromkeys(texts))
        rows = [self.text_features(distinct[i : i + self.chunk]) for i in range(0, len(distinct), self.chunk)]
        embeddings = unit(torch.cat(rows))
        where = {text: i for i, text in enumerate(distinct)}
        return embeddings[[where[text] for text in texts]]

    def text_features(self, texts: Sequence[str]) -> Float[Tensor, "items embed"]:
        """Projected end token of one batch, not normalised."""
        if self.tokenizer is None:
            raise InputError("tokenizer", None, "given, for an encoder of texts")
        ids = self.tokenizer(texts).to(self.model.device)
        features: Tensor = self.model.get_text_features(input_ids=ids).pooler_output
        return features


def unit(rows: Float[Tensor, "items embed"]) -> Float[Tensor, "items embed"]:
    """Rows of unit length, in float32 at least."""
    return torch.nn.functional.normalize(rows.to(torch.promote_types(rows.dtype, torch.float32)), dim=-1)


def fill_position_ids(model: Any) -> None:
    """Give the two position buffers, which no checkpoint stores, their values after a build on the meta device."""
    for embeddings in (model.text_model.embeddings, model.vision_model.embeddings):
        count = embeddings.position_embedding.weight.shape[0]
        embeddings.position_ids = torch.arange(count).expand((1, -1))
