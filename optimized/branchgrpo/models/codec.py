"""Around the network: the pipeline's encoders and VAE, loaded when needed, and the schedule of its scheduler."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from branchgrpo.models.condition import NEGATIVE, EncodedCondition
from branchgrpo.models.encoding import LENGTH, Encoder, check_texts, encode_texts, stack_items
from branchgrpo.models.folder import PipelineFolder
from branchgrpo.models.guidance import check_guidance
from branchgrpo.models.options import LoadOptions
from branchgrpo.models.prompt_cache import PromptCache
from branchgrpo.models.schedules import pipeline_schedule
from branchgrpo.models.vae import decode_in_chunks, load_vae
from branchgrpo.reference.errors import InputError, ModelError
from branchgrpo.reference.protocols import Guidance

if TYPE_CHECKING:
    from PIL.Image import Image


class PipelineCodec(nn.Module):
    """Text in, samples out: what surrounds the velocity of a backbone.

    Attributes:
        folder: where the components are.
        transformer: the network; ``experts`` names all of them.
        guidance: how guidance enters the velocity (ROLL-4).
        options: how everything was loaded.
    """

    family: ClassVar[str]
    pipeline_classes: ClassVar[tuple[str, ...]]
    transformer_class: ClassVar[str]
    text_components: ClassVar[tuple[str, ...]]
    optional_text_components: ClassVar[tuple[str, ...]] = ()
    widths: ClassVar[dict[str, str]]
    """Condition tensor → the transformer's configuration key for its last dimension."""
    lora_targets: ClassVar[tuple[str, ...]]
    specific_options: ClassVar[tuple[str, ...]] = ()
    explicit_schedule: ClassVar[bool] = False
    default_length: ClassVar[int] = 512

    def __init__(
        self, folder: PipelineFolder, transformer: nn.Module, guidance: Guidance | None, options: LoadOptions
    ) -> None:
        super().__init__()
        self.folder = folder
        self.transformer = transformer
        self.options = options
        self.guidance = self.default_guidance() if guidance is None else guidance
        check_guidance(self.guidance, self.guidance_kinds())
        self._vae: list[Any] = []  # a list hides the VAE from parameters() and state_dict()

    @property
    def experts(self) -> Mapping[str, Any]:
        """Every transformer by component name."""
        return {"transformer": self.transformer}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the transformer wants its input."""
        return next(iter(self.experts.values())).dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Where the transformer is."""
        return next(self.parameters()).device

    @property
    def config(self) -> Any:
        """The transformer's configuration."""
        return self.transformer.config

    @cached_property
    def vae_config(self) -> dict[str, Any]:
        """The VAE's configuration, read without loading it."""
        return self.folder.config("vae")

    @cached_property
    def pipeline_class(self) -> Any:
        """The diffusers class of the pipeline."""
        import diffusers

        return getattr(diffusers, self.folder.class_name)

    def guidance_kinds(self) -> tuple[str, ...]:
        """Guidance kinds that the weights can follow."""
        return ("none", "classifier_free")

    @abstractmethod
    def default_guidance(self) -> Guidance:
        """The guidance of a pipeline call without arguments."""

    @abstractmethod
    def check_latent(self, shape: Sequence[int]) -> None:
        """Raise ``InputError`` unless the network can take a latent ``[channels, (frames,) height, width]``."""

    @abstractmethod
    def encoder(self, pipeline: Any) -> Encoder:
        """The encoder of one text, around the pipeline's own ``encode_prompt``."""

    @property
    def text_length(self) -> int:
        """``max_sequence_length`` of the pipeline."""
        return self.options.max_sequence_length or self.default_length

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the files of the text encoders and tokenizers."""
        return self.folder.fingerprint(name for name in self.text_components if self.folder.has(name))

    @property
    def source(self) -> str:
        """Fingerprint of all that makes a condition; one made by other weights is refused."""
        return self.fingerprint

    def text_pipeline(self) -> Any:
        """The pipeline with its text encoders only.

        Raises:
            InputError: a missing text encoder.
        """
        for name in self.text_components:
            if self.folder.has(name) or name not in self.optional_text_components:
                self.folder.component(name)
        rest = {"transformer": None, "vae": None, "scheduler": None, **self.pipeline_extras()}
        absent = {name: None for name in self.text_components if not self.folder.has(name)}
        pipeline = self.pipeline_class.from_pretrained(
            self.folder.path, dtype=self.dtype, local_files_only=True, **rest, **absent
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline.to(self.device)

    def pipeline_extras(self) -> dict[str, Any]:
        """Components handed to the pipeline of the text encoders."""
        return {}

    def encode(
        self,
        prompts: Sequence[str],
        *,
        negative: str = "",
        images: Sequence["Image"] | None = None,
        size: tuple[int, ...] | None = None,
    ) -> EncodedCondition:
        """Encode prompts by the pipeline's own encoders, or read them from the cache.

        Args:
            prompts: one an item.
            negative: prompt of the unconditional branch; read under classifier-free guidance only.
            images: first frames, one an item, for image-to-video; otherwise None.
            size: (frames, height, width) in pixels of the video, with ``images``.

        Raises:
            InputError: no prompts, images where none belong, or a missing encoder.
        """
        if images is not None or size is not None:
            raise InputError("images, size", (images, size), f"left out: {self.family} starts from text alone")
        texts = check_texts("prompts", prompts)
        return EncodedCondition(self.encode_text_branches(texts, negative), self.family, self.source)

    def prompt_cache(self) -> PromptCache | None:
        """The folder of encoded prompts, if the options name one."""
        return None if self.options.cache is None else PromptCache(Path(self.options.cache))

    def text_settings(self) -> dict[str, object]:
        """What an entry of the cache depends on beside its text and the encoders."""
        return {"family": self.family, "length": self.text_length, "dtype": self.dtype}

    def fill_prompt_cache(self, prompts: Sequence[str], *, negative: str = "") -> None:
        """Encode what the cache lacks, with encoders that are loaded once and freed at the end.

        Args:
            prompts: any number, one at a time in memory.
            negative: as for ``encode``.

        Raises:
            InputError: no cache folder, or a missing encoder.
        """
        cache = self.prompt_cache()
        if cache is None:
            raise InputError("options.cache", None, "a folder for encoded prompts")
        guided = self.guidance.kind == "classifier_free"
        ready: list[Encoder] = []

        def load() -> Encoder:
            if not ready:
                ready.append(self.encoder(self.text_pipeline()))
            return ready[0]

        for text in [*prompts, negative] if guided else prompts:
            encode_texts((text,), load, cache, self.fingerprint, self.text_settings())

    def encode_text_branches(self, texts: tuple[str, ...], negative: str) -> dict[str, Tensor]:
        """The text tensors of both branches, on the model's device."""
        guided = self.guidance.kind == "classifier_free"
        wanted = [*texts, *check_texts("negative", (negative,))] if guided else [*texts]
        settings, cache = self.text_settings(), self.prompt_cache()
        entries = encode_texts(wanted, lambda: self.encoder(self.text_pipeline()), cache, self.fingerprint, settings)
        tensors = stack_items(entries[: len(texts)])
        if guided:
            tensors |= stack_items([entries[-1]] * len(texts), NEGATIVE)
        return {name: t if name.endswith(LENGTH) else t.to(self.device) for name, t in tensors.items()}

    @property
    def vae(self) -> Any:
        """The VAE, loaded on first use; not part of the module's parameters."""
        if not self._vae:
            self._vae.append(load_vae(self.folder, self.options))
        return self._vae[0].to(self.device)

    @abstractmethod
    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Shape of one state for a size in pixels.

        Raises:
            InputError: a size that the network or the VAE cannot take.
        """

    @abstractmethod
    def decode_latents(self, latents: Tensor) -> Tensor:
        """One VAE call: latents in the VAE's dtype → samples in [−1, 1]."""

    def decode(self, latents: Float[Tensor, "items *latent"]) -> Float[Tensor, "items *sample"]:
        """Images ``[items, 3, height, width]`` or videos ``[items, frames, 3, height, width]`` in [0, 1], float32.

        Raises:
            ModelError: a non-finite sample.
        """
        self.check_latent(tuple(latents.shape[1:]))
        ready = latents.to(device=self.vae.device, dtype=self.options.vae_dtype)
        samples = decode_in_chunks(ready, self.decode_latents, self.options.decode_chunk)
        if not bool(torch.isfinite(samples).all()):
            raise ModelError("decoded samples", "NaN or ±inf", f"finite; try another vae_dtype than {ready.dtype}")
        return samples

    def schedule(self, steps: int, latent_shape: Sequence[int]) -> tuple[float, ...]:
        """The noise levels of the pipeline's own scheduler (Wan: of the Euler scheduler with its shift)."""
        self.check_latent(latent_shape)
        return pipeline_schedule(self.folder, steps, self.tokens(latent_shape), self.explicit_schedule)

    def tokens(self, latent_shape: Sequence[int]) -> int:
        """Image tokens of a latent: a quarter of its positions."""
        return latent_shape[-2] * latent_shape[-1] // 4
