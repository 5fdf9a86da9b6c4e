"""How a backbone is loaded: plain validated data."""

from dataclasses import dataclass, fields
from pathlib import Path

import torch

from branchgrpo.reference.errors import OptionError, is_integer

SPECIFIC = ("embedded_scale", "low_noise_scale")
"""Options that only some families use; giving one to another family is an error."""


@dataclass(frozen=True)
class LoadOptions:
    """Everything about loading besides dtype, device, guidance and LoRA.

    Attributes:
        cache: folder of encoded prompts; None encodes anew every time.
        max_sequence_length: tokens of a prompt, as the pipeline's argument of that name; None is its default.
        vae_dtype: dtype of the VAE, which often needs more precision than the transformer.
        vae_tiling: decode large images and videos in overlapping tiles.
        vae_slicing: let the VAE take one sample at a time.
        decode_chunk: samples a VAE call, ≥ 1.
        gradient_checkpointing: recompute activations in the backward pass.
        embedded_scale: FLUX with an embedded guidance *and* classifier-free guidance: the embedded scale.
        low_noise_scale: Wan 2.2 with two experts: guidance scale of the low-noise expert; None is the same scale.
    """

    cache: Path | str | None = None
    max_sequence_length: int | None = None
    vae_dtype: torch.dtype = torch.float32
    vae_tiling: bool = False
    vae_slicing: bool = False
    decode_chunk: int = 8
    gradient_checkpointing: bool = False
    embedded_scale: float | None = None
    low_noise_scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_sequence_length", "decode_chunk"):
            value = getattr(self, name)
            if not (value is None and name == "max_sequence_length") and (not is_integer(value) or value < 1):
                raise OptionError(f"options.{name}", value, "an integer ≥ 1")
        if not self.vae_dtype.is_floating_point:
            raise OptionError("options.vae_dtype", self.vae_dtype, "a floating dtype")

    def check_used(self, family: str, uses: tuple[str, ...]) -> None:
        """Raise ``OptionError`` if an option is set that the family has no use for."""
        for field in fields(self):
            if field.name in SPECIFIC and field.name not in uses and getattr(self, field.name) is not None:
                raise OptionError(f"options.{field.name}", getattr(self, field.name), f"left out: {family} has no use")
