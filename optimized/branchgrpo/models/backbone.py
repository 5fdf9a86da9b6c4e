"""A velocity model around the transformer of a diffusers pipeline: loading, checks, guidance, LoRA."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from branchgrpo.models import guidance as guide
from branchgrpo.models import lora as low_rank
from branchgrpo.models.codec import PipelineCodec
from branchgrpo.models.condition import EncodedCondition
from branchgrpo.models.folder import PipelineFolder
from branchgrpo.models.lora import LoraOptions
from branchgrpo.models.options import LoadOptions
from branchgrpo.models.policy import ReferencePolicy
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Condition, Guidance

REGISTRY: dict[str, type["Backbone"]] = {}
"""Backbone of each pipeline class, filled as backbones are imported."""


class Backbone(PipelineCodec):
    """A ``VelocityModel`` around the transformer of a diffusers pipeline.

    A state is one latent of the VAE, ``[channels, (frames,) height, width]``: its shape alone tells the size, and what
    a network wants packed is packed inside the call (a permutation, which no density or norm notices).

    A family defines the class variables, ``predict``, ``encoder``, ``latent_shape``, ``check_latent`` and
    ``decode_latents``.

    Attributes:
        guidance: how guidance enters the velocity (ROLL-4).
        folder: where the components are.
        transformer: the network; ``experts`` names all of them.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        REGISTRY.update(dict.fromkeys(getattr(cls, "pipeline_classes", ()), cls))

    # ---- loading -------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        guidance: Guidance | None = None,
        lora: LoraOptions | None = None,
        options: LoadOptions | None = None,
    ) -> Self:
        """Load the transformer of a pipeline; VAE and encoders are loaded when they are needed first.

        Args:
            source: a pipeline folder (nothing then reaches for the network), or a hub id.
            dtype: dtype of the transformer and of the text encoders.
            device: where they go.
            guidance: None is the pipeline's default.
            lora: None trains every parameter of the transformer.
            options: everything else.

        Raises:
            InputError: a wrong folder, a missing component, an unsupported class.
            OptionError: a guidance or option that these weights cannot follow.
        """
        options = options or LoadOptions()
        options.check_used(cls.family, cls.specific_options)
        folder = PipelineFolder.resolve(source)
        cls.check_folder(folder)
        model = cls(folder, cls.load_transformer(folder, "transformer", dtype), guidance, options)
        model.load_rest(dtype)
        for transformer in model.experts.values():
            if options.gradient_checkpointing:
                transformer.enable_gradient_checkpointing()
            if lora is not None:
                low_rank.attach(transformer, lora, cls.lora_targets, model.unread_layers())
        return model.to(device).eval()

    @classmethod
    def check_folder(cls, folder: PipelineFolder) -> None:
        """Raise ``InputError`` unless the folder holds a pipeline of this family, with all of its components."""
        if folder.class_name not in cls.pipeline_classes:
            raise InputError(f"{folder.path}: pipeline", folder.class_name, f"one of {list(cls.pipeline_classes)}")
        for name in ("transformer", "vae", "scheduler"):
            folder.component(name)
        for name in cls.text_components:
            if folder.has(name):
                folder.component(name)
        kind = folder.component_class("transformer")
        if kind != cls.transformer_class:
            raise InputError(f"{folder.path}: transformer", kind, cls.transformer_class)

    @classmethod
    def load_transformer(cls, folder: PipelineFolder, name: str, dtype: torch.dtype) -> Any:
        """One transformer of the pipeline, by its component name.

        Some networks keep a few layers in float32 whatever the dtype; under float64 those are widened too.
        """
        import diffusers

        kind = getattr(diffusers, cls.transformer_class)
        transformer = kind.from_pretrained(folder.component(name), dtype=dtype, local_files_only=True)
        return transformer.double() if dtype == torch.float64 else transformer

    def load_rest(self, dtype: torch.dtype) -> None:
        """Load further transformers of the family; most have none."""
        del dtype

    # ---- velocity ------------------------------------------------------------------------------------------------

    @abstractmethod
    def predict(
        self, x: Float[Tensor, "items *latent"], time: Float[Tensor, "items"], tensors: dict[str, Tensor]
    ) -> Float[Tensor, "items *latent"]:
        """One call of the network, without guidance.

        Args:
            x: latents in the network's dtype.
            time: 1000·σ in float32 at least, never truncated to a whole number.
            tensors: condition of one branch.
        """

    def scales(self, time: Float[Tensor, "items"]) -> Float[Tensor, "items"]:
        """Guidance scale of every item."""
        return torch.full_like(time, self.guidance.scale)

    def combine(
        self, negative: Float[Tensor, "items *latent"], conditional: Float[Tensor, "items *latent"], scale: Tensor
    ) -> Float[Tensor, "items *latent"]:
        """Guided velocity of two branches."""
        return guide.combine(negative, conditional, scale)

    def forward(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """v = ε − x⁰ of every item, guidance applied.

        Clause: ROLL-3, ROLL-4.

        Args:
            x: states, all of one size.
            sigma: σ of every item.
            condition: one item a state, made by ``encode``.

        Raises:
            InputError: a size the network cannot take, another batch, or the condition of another model.
        """
        tensors = self.check_call(x, sigma, condition)
        precise = torch.promote_types(torch.float32, self.dtype)
        time, latents = 1000.0 * sigma.to(precise), x.to(self.dtype)
        if self.guidance.kind != "classifier_free":
            return self.predict(latents, time, guide.positive(tensors)).to(x.dtype)
        both = self.predict(torch.cat([latents, latents]), torch.cat([time, time]), guide.two_branches(tensors))
        negative, conditional = both.to(precise).chunk(2)
        return self.combine(negative, conditional, self.scales(time)).to(x.dtype)

    def check_call(
        self, x: Tensor, sigma: Tensor, condition: Condition, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Check one call (ERR-3) and return the condition's tensors, in the network's dtype by default."""
        self.check_latent(tuple(x.shape[1:]))
        if not isinstance(condition, EncodedCondition) or condition.family != self.family:
            found = getattr(condition, "family", "") or type(condition).__name__
            raise InputError("condition", found, f"encoded by a {self.family} backbone")
        if len(condition) != len(x) or len(sigma) != len(x):
            raise InputError("len(condition), len(sigma)", (len(condition), len(sigma)), f"{len(x)}, one an item")
        for name, key in self.widths.items():
            tensor, width = condition.tensors.get(name), self.config[key]
            if tensor is None or tensor.shape[-1] != width:
                found = None if tensor is None else tuple(tensor.shape)
                raise InputError(f"condition.{name}", found, f"of width {width}: the condition of another model?")
        if condition.fingerprint != self.source:
            raise InputError("condition.fingerprint", condition.fingerprint, f"{self.source}: made by these encoders")
        return condition.to(device=x.device, dtype=dtype or self.dtype).tensors

    def unread_layers(self) -> str | None:
        """Pattern of the layers whose output nothing reads: most networks have none."""
        return None

    # ---- training ------------------------------------------------------------------------------------------------

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters that a step may change."""
        return ((name, p) for name, p in self.named_parameters() if p.requires_grad)

    def adapters_off(self) -> AbstractContextManager[None]:
        """Context in which the velocity is that of the weights without LoRA."""
        return low_rank.adapters_off(self.experts)

    def reference(self) -> "ReferencePolicy":
        """The frozen reference policy: the same weights without LoRA."""
        return ReferencePolicy(self)

    def save_lora(self, folder: str | Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write the adapter so that the pipeline's ``load_lora_weights`` reads it, rank and alpha included.

        A second expert goes to the sub-folder of its component name.

        Args:
            folder: to write to.
            state: weights in place of the present ones, by this module's names (averages, gathered shards).
        """
        for name, transformer in self.experts.items():
            own = None if state is None else with_prefix(state, name + ".")
            low_rank.save(transformer, self.pipeline_class, lora_folder(Path(folder), name), own)

    def load_lora(self, folder: str | Path) -> None:
        """Replace the adapter by a saved one."""
        for name, transformer in self.experts.items():
            low_rank.load(transformer, self.pipeline_class, lora_folder(Path(folder), name))


def with_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The entries whose names start with ``prefix``, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def lora_folder(folder: Path, component: str) -> Path:
    """Where the adapter of a component lives."""
    return folder if component == "transformer" else folder / component
