"""SD3 and SD3.5: two-branch guidance over CLIP and T5 embeddings."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from branchgrpo.models.backbone import Backbone
from branchgrpo.models.encoding import Encoder
from branchgrpo.models.lora import JOINT_ATTENTION
from branchgrpo.models.sizes import check_latent, divided, image_latent_shape
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Guidance


class StableDiffusion3(Backbone):
    """SD3-medium, SD3.5-medium and SD3.5-large; T5 may be absent."""

    family = "stable_diffusion_3"
    pipeline_classes = ("StableDiffusion3Pipeline",)
    transformer_class = "SD3Transformer2DModel"
    text_components = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
    optional_text_components = ("text_encoder_3", "tokenizer_3")
    widths = {"text": "joint_attention_dim", "pooled": "pooled_projection_dim"}  # noqa: RUF012
    lora_targets = JOINT_ATTENTION
    default_length = 256

    def default_guidance(self) -> Guidance:
        """Classifier-free at 7, as the pipeline's default."""
        return Guidance("classifier_free", 7.0)

    def check_latent(self, shape: Sequence[int]) -> None:
        """``[channels, height, width]``: multiples of the patch, no larger than the table of positions."""
        patch, longest = self.config.patch_size, self.config.pos_embed_max_size
        check_latent(shape, (self.config.in_channels,), (patch, patch))
        for name, side in zip(("height", "width"), shape[1:], strict=True):
            if side // patch > longest:
                raise InputError(f"latent {name}", side, f"at most {longest * patch}: the network's table of positions")

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Sides are multiples of the VAE's factor times the patch."""
        factor = 2 ** (len(self.vae_config["block_out_channels"]) - 1)
        channels, patch = self.config.in_channels, self.config.patch_size
        shape = image_latent_shape(channels, height, width, frames, factor, patch)
        self.check_latent(shape)
        return shape

    def tokens(self, latent_shape: Sequence[int]) -> int:
        """Patches of the latent."""
        patch = int(self.config.patch_size)
        return (latent_shape[-2] // patch) * (latent_shape[-1] // patch)

    def unread_layers(self) -> str | None:
        """The last block's text stream ends there: its queries and its output feed nothing."""
        return rf"transformer_blocks\.{self.config.num_layers - 1}\.attn\.(add_q_proj|to_add_out)"

    def predict(
        self, x: Float[Tensor, "items channels height width"], time: Float[Tensor, "items"], tensors: dict[str, Tensor]
    ) -> Float[Tensor, "items channels height width"]:
        """The network takes 1000·σ."""
        output: Tensor = self.transformer(
            hidden_states=x,
            timestep=time,
            encoder_hidden_states=tensors["text"],
            pooled_projections=tensors["pooled"],
            return_dict=False,
        )[0]
        return output

    def pipeline_extras(self) -> dict[str, Any]:
        """Without T5 the pipeline reads the width of the missing tokens from the transformer."""
        return {} if self.folder.has("text_encoder_3") else {"transformer": self.transformer}

    def encoder(self, pipeline: Any) -> Encoder:
        """CLIP and T5 tokens, and both pooled embeddings."""

        def encode(text: str) -> dict[str, Tensor]:
            tokens, _, pooled, _ = pipeline.encode_prompt(
                text,
                None,
                None,
                device=self.device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.text_length,
            )
            return {"text": tokens, "pooled": pooled}

        return encode

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Undo the VAE's scale and shift, then decode."""
        config = self.vae.config
        return divided(self.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False))
