"""Qwen-Image: packed latents, masked text of any length, true classifier-free guidance with the norm kept."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from branchgrpo.models.backbone import Backbone
from branchgrpo.models.encoding import LENGTH, Encoder, lengths
from branchgrpo.models.guidance import combine_rescaled
from branchgrpo.models.lora import JOINT_ATTENTION
from branchgrpo.models.packing import pack, unpack
from branchgrpo.models.sizes import check_latent, divided, image_latent_shape
from branchgrpo.models.vae import channel_statistics
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Guidance


def text_mask(length: Int64[Tensor, "items"], device: torch.device) -> Bool[Tensor, "items tokens"] | None:
    """Which tokens of the longest text are an item's own; None where all are, which is the faster attention."""
    longest = int(length.max())
    if bool((length == longest).all()):
        return None
    return (torch.arange(longest) < length.unsqueeze(1)).to(device)


class QwenImage(Backbone):
    """Qwen-Image and its kin without an embedded guidance."""

    family = "qwen_image"
    pipeline_classes = ("QwenImagePipeline",)
    transformer_class = "QwenImageTransformer2DModel"
    text_components = ("text_encoder", "tokenizer")
    widths = {"text": "joint_attention_dim"}  # noqa: RUF012
    lora_targets = JOINT_ATTENTION
    explicit_schedule = True

    def guidance_kinds(self) -> tuple[str, ...]:
        """Weights with an embedded guidance cannot be run by the present network code.

        Raises:
            InputError: such weights.
        """
        if self.config.guidance_embeds:
            raise InputError("transformer.guidance_embeds", True, "False: diffusers has no such Qwen-Image network")
        return super().guidance_kinds()

    def default_guidance(self) -> Guidance:
        """True classifier-free guidance at 4, as the pipeline's default."""
        return Guidance("classifier_free", 4.0)

    def check_latent(self, shape: Sequence[int]) -> None:
        """``[channels, height, width]`` with even sides."""
        check_latent(shape, (self.config.in_channels // 4,), (2, 2))

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Sides are multiples of the VAE's factor times two."""
        factor = 2 ** len(self.vae_config["temperal_downsample"])
        return image_latent_shape(self.config.in_channels // 4, height, width, frames, factor, 2)

    def unread_layers(self) -> str | None:
        """The last block's text stream ends there: its queries and its output feed nothing."""
        return rf"transformer_blocks\.{self.config.num_layers - 1}\.attn\.(add_q_proj|to_add_out)"

    def predict(
        self, x: Float[Tensor, "items channels height width"], time: Float[Tensor, "items"], tensors: dict[str, Tensor]
    ) -> Float[Tensor, "items channels height width"]:
        """Padding beyond the longest text of the call is cut off, and the rest masked."""
        height, width = x.shape[-2:]
        length = tensors[LENGTH].cpu()
        packed = self.transformer(
            hidden_states=pack(x),
            timestep=time / 1000,
            guidance=None,
            encoder_hidden_states=tensors["text"][:, : int(length.max())],
            encoder_hidden_states_mask=text_mask(length, x.device),
            img_shapes=[[(1, height // 2, width // 2)]] * len(x),
            return_dict=False,
        )[0]
        return unpack(packed, height, width)

    def combine(
        self, negative: Float[Tensor, "items *latent"], conditional: Float[Tensor, "items *latent"], scale: Tensor
    ) -> Float[Tensor, "items *latent"]:
        """Every token keeps the norm of its conditional velocity."""
        height, width = negative.shape[-2:]
        return unpack(combine_rescaled(pack(negative), pack(conditional), scale), height, width)

    def encoder(self, pipeline: Any) -> Encoder:
        """Hidden states of the prompt's tokens, behind the template; one text alone has no padding."""

        def encode(text: str) -> dict[str, Tensor]:
            tokens, _ = pipeline.encode_prompt(text, device=self.device, max_sequence_length=self.text_length)
            if tokens.shape[1] == 0:
                raise InputError("prompt", text, "at least one token: use a space for an empty prompt")
            return {"text": tokens, LENGTH: lengths(tokens.shape[1])}

        return encode

    def decode_latents(self, latents: Tensor) -> Tensor:
        """An image is a video of one frame to this VAE."""
        mean, std = channel_statistics(self.vae, latents)
        video = divided(self.vae.decode(latents.unsqueeze(2) * std + mean, return_dict=False))
        return video[:, :, 0]
