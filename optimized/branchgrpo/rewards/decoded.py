"""A reward on latents: decode, then score."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.reference.errors import InputError, is_integer
from branchgrpo.reference.protocols import Prompt, RewardModel


class DecodedReward:
    """A reward model on decoded samples, for callers that hand it latents; the name, version and range stay."""

    def __init__(self, model: RewardModel, decode: Callable[[Tensor], Tensor], chunk: int = 16) -> None:
        """Wrap ``model``.

        Args:
            model: a reward on decoded samples.
            decode: from latents [items, *latent] to samples [items, *sample].
            chunk: items decoded at a time.
        """
        if not is_integer(chunk) or chunk < 1:
            raise InputError("chunk", chunk, "an integer ≥ 1")
        self.model = model
        self.decode = decode
        self.chunk = chunk
        self.name = model.name
        self.version = model.version
        self.range = model.range

    def __call__(self, samples: Tensor, prompts: Sequence[Prompt]) -> Float64[Tensor, "items"]:
        """Chunk by chunk, every sample with its own prompt (REW-3)."""
        if len(prompts) != len(samples):
            raise InputError("len(prompts)", len(prompts), f"{len(samples)}, one an item")
        starts = range(0, len(samples), self.chunk)
        parts = [self.model(self.decode(samples[i : i + self.chunk]), prompts[i : i + self.chunk]) for i in starts]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
