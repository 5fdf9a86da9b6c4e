"""FLUX.1: packed latents, image and text ids, an embedded guidance (dev) or none (schnell)."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.models.backbone import Backbone
from branchgrpo.models.encoding import Encoder
from branchgrpo.models.lora import JOINT_ATTENTION
from branchgrpo.models.packing import pack, unpack
from branchgrpo.models.sizes import check_latent, divided, image_latent_shape
from branchgrpo.reference.protocols import Guidance


def position_ids(height: int, width: int, device: torch.device) -> Float[Tensor, "tokens 3"]:
    """Row and column of every 2×2 patch of a latent, row by row."""
    rows, columns = torch.arange(height // 2, device=device), torch.arange(width // 2, device=device)
    grid = torch.cartesian_prod(rows, columns).float()
    return torch.nn.functional.pad(grid, (1, 0))


class Flux(Backbone):
    """FLUX.1-dev, FLUX.1-schnell and their kin.

    Guidance: ``embedded`` where the weights have a guidance embedding, else ``none``; ``classifier_free`` is the
    pipeline's ``true_cfg_scale`` on top of either, with ``options.embedded_scale`` where there is an embedding.
    """

    family = "flux"
    pipeline_classes = ("FluxPipeline",)
    transformer_class = "FluxTransformer2DModel"
    text_components = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    widths = {"text": "joint_attention_dim", "pooled": "pooled_projection_dim"}  # noqa: RUF012
    lora_targets = JOINT_ATTENTION
    specific_options = ("embedded_scale",)
    explicit_schedule = True

    def guidance_kinds(self) -> tuple[str, ...]:
        """``embedded`` needs weights with a guidance embedding, which in turn always read a scale."""
        return ("embedded", "classifier_free") if self.config.guidance_embeds else ("none", "classifier_free")

    def default_guidance(self) -> Guidance:
        """3.5 where it is embedded, as the pipeline's default."""
        return Guidance("embedded", 3.5) if self.config.guidance_embeds else Guidance()

    def embedded_scale(self) -> float | None:
        """The scale that the network reads, if it reads one."""
        if not self.config.guidance_embeds:
            return None
        if self.guidance.kind == "embedded":
            return self.guidance.scale
        return 3.5 if self.options.embedded_scale is None else self.options.embedded_scale

    def check_latent(self, shape: Sequence[int]) -> None:
        """``[channels, height, width]`` with even sides."""
        check_latent(shape, (self.config.in_channels // 4,), (2, 2))

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Sides are multiples of the VAE's factor times two."""
        return image_latent_shape(self.config.in_channels // 4, height, width, frames, self.vae_factor(), 2)

    def vae_factor(self) -> int:
        """Pixels a latent position."""
        return int(2 ** (len(self.vae_config["block_out_channels"]) - 1))

    def predict(
        self, x: Float[Tensor, "items channels height width"], time: Float[Tensor, "items"], tensors: dict[str, Tensor]
    ) -> Float[Tensor, "items channels height width"]:
        """The network multiplies the time by 1000 itself."""
        height, width = x.shape[-2:]
        scale = self.embedded_scale()
        packed = self.transformer(
            hidden_states=pack(x),
            timestep=time / 1000,
            guidance=None if scale is None else torch.full_like(time, scale),
            pooled_projections=tensors["pooled"],
            encoder_hidden_states=tensors["text"],
            txt_ids=torch.zeros(tensors["text"].shape[1], 3, device=x.device),
            img_ids=position_ids(height, width, x.device),
            return_dict=False,
        )[0]
        return unpack(packed, height, width)

    def encoder(self, pipeline: Any) -> Encoder:
        """T5 tokens and the pooled CLIP embedding."""

        def encode(text: str) -> dict[str, Tensor]:
            tokens, pooled, _ = pipeline.encode_prompt(
                text, None, device=self.device, max_sequence_length=self.text_length
            )
            return {"text": tokens, "pooled": pooled}

        return encode

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Undo the VAE's scale and shift, then decode."""
        config = self.vae.config
        return divided(self.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False))
