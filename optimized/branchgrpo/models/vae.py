"""Decoding latents in chunks, with tiling and slicing."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.models.folder import PipelineFolder
from branchgrpo.models.options import LoadOptions
from branchgrpo.reference.errors import OptionError


def load_vae(folder: PipelineFolder, options: LoadOptions) -> Any:
    """The pipeline's VAE, frozen, on the CPU.

    Raises:
        InputError: the component is missing.
        OptionError: tiling or slicing of a VAE that has none.
    """
    import diffusers

    path, kind = folder.component("vae"), folder.component_class("vae")
    vae = getattr(diffusers, kind).from_pretrained(path, dtype=options.vae_dtype, local_files_only=True)
    for name, wanted in (("tiling", options.vae_tiling), ("slicing", options.vae_slicing)):
        if wanted and not hasattr(vae, f"enable_{name}"):
            raise OptionError(f"options.vae_{name}", wanted, f"False: {kind} has no {name}")
        if wanted:
            getattr(vae, f"enable_{name}")()
    return vae.eval().requires_grad_(False)


def channel_statistics(vae: Any, like: Float[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
    """Mean and std of the latents of a video VAE, shaped to broadcast over [items, channels, frames, height, width]."""
    shape = (1, vae.config.z_dim, 1, 1, 1)
    values = (vae.config.latents_mean, vae.config.latents_std)
    mean, std = (torch.tensor(numbers).view(shape).to(like) for numbers in values)
    return mean, std


@torch.no_grad()
def decode_in_chunks(
    latents: Float[Tensor, "items *latent"], decode: Callable[[Tensor], Tensor], chunk: int
) -> Float[Tensor, "items *sample"]:
    """Decode ``chunk`` samples at a time, then map [−1, 1] to [0, 1] in float32."""
    parts = [decode(part).float() for part in torch.split(latents, chunk)]
    return (torch.cat(parts) / 2 + 0.5).clamp(0, 1)
