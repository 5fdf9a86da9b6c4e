"""Wan 2.1 and 2.2, text-to-video: 5-D latents, guidance, two experts that share the noise levels between them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from branchgrpo.models.backbone import Backbone
from branchgrpo.models.encoding import Encoder
from branchgrpo.models.folder import PipelineFolder
from branchgrpo.models.guidance import check_guidance
from branchgrpo.models.lora import ATTENTION
from branchgrpo.models.options import LoadOptions
from branchgrpo.models.sizes import check_latent, check_pixels, divided
from branchgrpo.models.vae import channel_statistics
from branchgrpo.reference.errors import InputError, OptionError, is_integer
from branchgrpo.reference.protocols import Guidance

LOW_NOISE = "transformer_2"


class Wan(Backbone):
    """Wan text-to-video.

    Wan 2.2 switches by noise level: ``transformer`` where 1000·σ ≥ 1000·boundary_ratio, ``transformer_2`` below; the
    items of one call may lie on both sides. Wan 2.2 TI2V (``expand_timesteps``) takes a time a token.
    """

    family = "wan"
    pipeline_classes = ("WanPipeline",)
    transformer_class = "WanTransformer3DModel"
    text_components = ("text_encoder", "tokenizer")
    widths = {"text": "text_dim"}  # noqa: RUF012
    lora_targets = ATTENTION
    specific_options = ("low_noise_scale",)

    def __init__(
        self, folder: PipelineFolder, transformer: nn.Module, guidance: Guidance | None, options: LoadOptions
    ) -> None:
        super().__init__(folder, transformer, guidance, options)
        self.transformer_2: nn.Module | None = None

    @property
    def boundary(self) -> float | None:
        """Noise level at which the experts change, or None with one expert."""
        ratio = self.folder.index.get("boundary_ratio")
        return None if ratio is None else float(ratio)

    @property
    def expands_timesteps(self) -> bool:
        """Whether the network takes a time a token (Wan 2.2 TI2V)."""
        return bool(self.folder.index.get("expand_timesteps", False))

    @property
    def experts(self) -> Mapping[str, Any]:
        """One or two transformers."""
        low = {} if self.transformer_2 is None else {LOW_NOISE: self.transformer_2}
        return {"transformer": self.transformer, **low}

    def load_rest(self, dtype: torch.dtype) -> None:
        """Load the low-noise expert, where there is one.

        Raises:
            InputError: a boundary without a second expert, or the reverse.
            OptionError: a low-noise guidance scale with a single expert.
        """
        if (self.boundary is not None) != self.folder.has(LOW_NOISE):
            found = (self.boundary, self.folder.has(LOW_NOISE))
            raise InputError("boundary_ratio, transformer_2", found, "both, or neither, in model_index.json")
        if self.boundary is not None:
            self.transformer_2 = self.load_transformer(self.folder, LOW_NOISE, dtype)
        if self.options.low_noise_scale is None:
            return
        if self.boundary is None or self.guidance.kind != "classifier_free":
            legal = "left out without a second expert and classifier-free guidance"
            raise OptionError("options.low_noise_scale", self.options.low_noise_scale, legal)
        check_guidance(Guidance("classifier_free", self.options.low_noise_scale), self.guidance_kinds())

    def default_guidance(self) -> Guidance:
        """Classifier-free at 5, as the pipeline's default."""
        return Guidance("classifier_free", 5.0)

    @property
    def latent_channels(self) -> int:
        """Channels of the state; the network may see more."""
        return int(self.vae_config.get("z_dim", 16))

    def check_latent(self, shape: Sequence[int]) -> None:
        """``[channels, frames, height, width]``: multiples of the patch, inside the rotary table."""
        check_latent(shape, (self.latent_channels,), tuple(self.config.patch_size))
        for name, side, patch in zip(("frames", "height", "width"), shape[1:], self.config.patch_size, strict=True):
            if side // patch > self.config.rope_max_seq_len:
                raise InputError(f"latent {name}", side, f"at most {self.config.rope_max_seq_len * patch}")

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Sides are multiples of the VAE's factor times the patch (and of 16); frames are 1 + n·factor."""
        space = int(self.vae_config.get("scale_factor_spatial", 8))
        time = int(self.vae_config.get("scale_factor_temporal", 4))
        _, down, across = self.config.patch_size
        check_pixels(height, width, (max(16, space * down), max(16, space * across)))
        if not is_integer(frames) or frames < 1 or (frames - 1) % time:
            raise InputError("frames", frames, f"1 + n·{time}")
        shape = (self.latent_channels, (frames - 1) // time + 1, height // space, width // space)
        self.check_latent(shape)
        return shape

    def tokens(self, latent_shape: Sequence[int]) -> int:
        """Patches of the latent."""
        down, along, across = self.config.patch_size
        return int((latent_shape[1] // down) * (latent_shape[2] // along) * (latent_shape[3] // across))

    def is_high_noise(self, time: Float[Tensor, "items"]) -> Bool[Tensor, "items"]:
        """Which items the high-noise expert takes."""
        return time >= (0.0 if self.boundary is None else 1000.0 * self.boundary)

    def scales(self, time: Float[Tensor, "items"]) -> Float[Tensor, "items"]:
        """The low-noise expert may have a scale of its own."""
        low = self.options.low_noise_scale
        scales = super().scales(time)
        return scales if low is None else torch.where(self.is_high_noise(time), scales, low)

    def predict(
        self, x: Float[Tensor, "items *latent"], time: Float[Tensor, "items"], tensors: dict[str, Tensor]
    ) -> Float[Tensor, "items *latent"]:
        """Each item by the expert of its noise level, in the order given."""
        if self.transformer_2 is None:
            return self.call(self.transformer, x, time, tensors)
        high = self.is_high_noise(time)
        groups = [(self.transformer, high.nonzero().flatten()), (self.transformer_2, (~high).nonzero().flatten())]
        outputs, order = [], torch.cat([index for _, index in groups])
        for expert, index in groups:
            if len(index):
                chosen = {name: t.index_select(0, index.to(t.device)) for name, t in tensors.items()}
                outputs.append(self.call(expert, x[index], time[index], chosen))
        return torch.cat(outputs)[order.argsort()]

    def call(
        self,
        expert: nn.Module,
        x: Float[Tensor, "items *latent"],
        time: Float[Tensor, "items"],
        tensors: dict[str, Tensor],
    ) -> Float[Tensor, "items *latent"]:
        """One call of one expert; it takes 1000·σ, in float32."""
        token_time = time.unsqueeze(1).expand(-1, self.tokens(x.shape[1:])) if self.expands_timesteps else time
        return divided(expert(x, token_time, tensors["text"], return_dict=False))

    def encoder(self, pipeline: Any) -> Encoder:
        """UMT5 tokens, zero behind the prompt."""

        def encode(text: str) -> dict[str, Tensor]:
            tokens, _ = pipeline.encode_prompt(
                text, do_classifier_free_guidance=False, device=self.device, max_sequence_length=self.text_length
            )
            return {"text": tokens}

        return encode

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Videos as [items, frames, 3, height, width]."""
        mean, std = channel_statistics(self.vae, latents)
        return divided(self.vae.decode(latents * std + mean, return_dict=False)).transpose(1, 2)
