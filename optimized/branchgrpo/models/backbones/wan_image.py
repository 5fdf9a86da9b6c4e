"""Wan 2.1 and 2.2, image-to-video: the first frame as extra channels, as image tokens, or as a fixed frame."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from branchgrpo.models.backbones.wan import Wan
from branchgrpo.models.condition import EncodedCondition
from branchgrpo.models.encoding import check_texts, stack_items
from branchgrpo.models.guidance import per_item
from branchgrpo.models.prompt_cache import cache_key
from branchgrpo.models.sizes import divided
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Condition

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_COMPONENTS = ("image_encoder", "image_processor")


class WanImage(Wan):
    """Wan image-to-video.

    Wan 2.1 and 2.2 see the encoded first frame and its mask as 20 extra channels; Wan 2.1 reads CLIP tokens of the
    image too. Wan 2.2 TI2V instead replaces the first latent frame of its input by the encoded image, at time 0: here
    that frame's velocity is (x − c)/σ, which carries the state to the image c and does not depend on the weights, so
    that it ends where the pipeline puts it and no log-probability ratio feels it.
    """

    family = "wan_image"
    pipeline_classes = ("WanImageToVideoPipeline",)

    @property
    def sees_tokens(self) -> bool:
        """Whether the network reads CLIP tokens of the image."""
        return self.config.image_dim is not None

    @cached_property
    def image_fingerprint(self) -> str:
        """Hash of what encodes the image."""
        return self.folder.fingerprint(("vae", *(IMAGE_COMPONENTS if self.sees_tokens else ())))

    @property
    def source(self) -> str:
        """Fingerprints of the text encoder and of what encodes the image."""
        return f"{self.fingerprint}+{self.image_fingerprint}"

    def encode(
        self,
        prompts: Sequence[str],
        *,
        negative: str = "",
        images: Sequence["Image"] | None = None,
        size: tuple[int, ...] | None = None,
    ) -> EncodedCondition:
        """Encode prompts and first frames.

        Args:
            prompts: one an item.
            negative: prompt of the unconditional branch.
            images: first frames, one a prompt.
            size: (frames, height, width) of the video in pixels.

        Raises:
            InputError: images of another number, or a size the network cannot take.
        """
        texts = check_texts("prompts", prompts)
        if images is None or len(images) != len(texts):
            raise InputError("images", None if images is None else len(images), f"{len(texts)} images, one a prompt")
        if size is None or len(size) != 3:
            raise InputError("size", size, "(frames, height, width) in pixels")
        self.latent_shape(size[1], size[2], size[0])
        tensors = self.encode_text_branches(texts, negative)
        frames = stack_items([self.encode_image(image, size) for image in images])
        tensors |= {name: t.to(self.device) for name, t in frames.items()}
        return EncodedCondition(tensors, self.family, self.source)

    def encode_image(self, image: "Image", size: tuple[int, ...]) -> dict[str, Tensor]:
        """The tensors of one first frame, from the cache or by the pipeline's own code."""
        content = hashlib.sha256(f"{image.mode}{image.size}".encode() + image.tobytes()).hexdigest()
        settings = {"size": size, "vae_dtype": self.options.vae_dtype, "dtype": self.dtype}
        key = cache_key(self.image_fingerprint, content, settings)
        cache = self.prompt_cache()
        entry = cache.get(key) if cache else None
        if entry is None:
            entry = self.run_image_encoders(image, size)
            if cache:
                cache.put(key, entry, f"image {content}")
        return entry

    @torch.no_grad()
    def run_image_encoders(self, image: "Image", size: tuple[int, ...]) -> dict[str, Tensor]:
        """What the pipeline makes of a first frame before its loop."""
        pipeline, (frames, height, width) = self.image_pipeline(), size
        pixels = pipeline.video_processor.preprocess(image, height=height, width=width)
        start = torch.zeros(1, *self.latent_shape(height, width, frames), device=self.device)
        made = pipeline.prepare_latents(
            pixels.to(self.device, torch.float32),
            1,
            num_frames=frames,
            height=height,
            width=width,
            dtype=torch.float32,
            device=self.device,
            latents=start,
        )
        entry = {"frame": made[1]}
        if self.sees_tokens:
            entry["image_tokens"] = pipeline.encode_image(image, self.device)
        return entry

    def image_pipeline(self) -> Any:
        """The pipeline with the VAE and the image encoder only.

        Raises:
            InputError: a missing image encoder.
        """
        absent: dict[str, Any] = dict.fromkeys(self.text_components)
        absent |= {"transformer": None, "transformer_2": None, "scheduler": None}
        for name in IMAGE_COMPONENTS:
            if self.sees_tokens:
                self.folder.component(name)
            else:
                absent[name] = None
        pipeline = self.pipeline_class.from_pretrained(
            self.folder.path, vae=self.vae, dtype=self.dtype, local_files_only=True, **absent
        )
        return pipeline.to(self.device)

    def pipeline_extras(self) -> dict[str, Any]:
        """The text pipeline needs no image encoder."""
        return dict.fromkeys((*IMAGE_COMPONENTS, "transformer_2"))

    def call(
        self,
        expert: nn.Module,
        x: Float[Tensor, "items channels frames height width"],
        time: Float[Tensor, "items"],
        tensors: dict[str, Tensor],
    ) -> Float[Tensor, "items channels frames height width"]:
        """One call of one expert with the image beside, or in, the state."""
        if not self.expands_timesteps:
            x = torch.cat([x, tensors["frame"]], dim=1)
            return divided(expert(x, time, tensors["text"], tensors.get("image_tokens"), return_dict=False))
        seen = torch.cat([tensors["frame"], x[:, :, 1:]], dim=2)
        first = self.tokens((x.shape[1], self.config.patch_size[0], *x.shape[3:]))
        token_time = time.unsqueeze(1).repeat(1, self.tokens(x.shape[1:]))
        token_time[:, :first] = 0
        return divided(expert(seen, token_time, tensors["text"], tensors.get("image_tokens"), return_dict=False))

    def forward(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """v = ε − x⁰ of every item; with ``expand_timesteps`` the first latent frame's is (x − c)/σ."""
        v = super().forward(x, sigma, condition)
        if not self.expands_timesteps:
            return v
        frame = self.check_call(x, sigma, condition, x.dtype)["frame"]
        return torch.cat([(x[:, :, :1] - frame) / per_item(sigma, frame), v[:, :, 1:]], dim=2)

    def check_call(
        self, x: Tensor, sigma: Tensor, condition: Condition, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """The image must have been encoded for this size."""
        tensors = super().check_call(x, sigma, condition, dtype)
        channels = x.shape[1] if self.expands_timesteps else self.config.in_channels - x.shape[1]
        frames = 1 if self.expands_timesteps else x.shape[2]
        needed = (len(x), channels, frames, *x.shape[3:])
        found = tuple(tensors["frame"].shape) if "frame" in tensors else None
        if found != needed:
            raise InputError("condition.frame", found, f"{needed}: encode the images for this size")
        if self.sees_tokens != ("image_tokens" in tensors):
            raise InputError("condition", sorted(tensors), "encoded by this model: image_tokens differ")
        return tensors
