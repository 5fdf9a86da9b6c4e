"""Backbones by name, from public configurations, or read from a pipeline's folder."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from branchgrpo.reference.errors import InputError, OptionError, is_integer
from branchgrpo.training.planner.families.digits import digits
from branchgrpo.training.planner.families.flux import flux
from branchgrpo.training.planner.families.joint import qwen_image, stable_diffusion_3
from branchgrpo.training.planner.families.wan import wan
from branchgrpo.training.planner.network import Network

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
JOINT_ATTENTION = (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


@dataclass(frozen=True)
class Family:
    """What all backbones of one transformer class share.

    Attributes:
        network: the description of the network, from its configuration, tokens of the latent and of the prompt.
        patch: pixels of the latent a token, over (frames, height, width); None reads it from the configuration.
        text_tokens: of a prompt, padded as the pipelines pad it.
        guidance: the pipelines' default.
        targets: ends of the names of the layers that adapters sit on by default.
    """

    network: Callable[[Mapping[str, Any], int, int], Network]
    patch: tuple[int, int, int] | None
    text_tokens: int
    guidance: str
    targets: tuple[str, ...]

    def patch_of(self, config: Mapping[str, Any]) -> tuple[int, int, int]:
        """Latent pixels a token."""
        if self.patch is not None:
            return self.patch
        found = config["patch_size"]
        return (1, found, found) if is_integer(found) else tuple(found)


FAMILIES = {
    "FluxTransformer2DModel": Family(flux, (1, 2, 2), 512, "embedded", JOINT_ATTENTION),
    "SD3Transformer2DModel": Family(stable_diffusion_3, None, 77 + 256, "classifier_free", JOINT_ATTENTION),
    "QwenImageTransformer2DModel": Family(qwen_image, (1, 2, 2), 128, "classifier_free", JOINT_ATTENTION),
    "WanTransformer3DModel": Family(wan, None, 512, "classifier_free", ATTENTION),
    "DigitsVelocity": Family(digits, (1, 1, 1), 11, "none", ()),
}
"""Class of the transformer → family. Qwen-Image does not pad: 128 stands for a long prompt."""


@dataclass(frozen=True)
class Architecture:
    """A backbone, as far as costs depend on it.

    Attributes:
        name: as it was given.
        kind: class of the transformer.
        config: as its ``config.json`` holds it.
        channels: of the latent.
        space, time: pixels and frames a latent pixel.
        experts: transformers of the pipeline, of which each call uses one.
    """

    name: str
    kind: str
    config: Mapping[str, Any]
    channels: int
    space: int = 8
    time: int = 1
    experts: int = 1

    @property
    def family(self) -> Family:
        """Its family."""
        return FAMILIES[self.kind]

    def latent(self, height: int, width: int, frames: int) -> tuple[int, int, int, int]:
        """Channels, frames, height and width of a sample's latent.

        Raises:
            InputError: a side that is not a multiple of what VAE and network need together.
        """
        if self.kind == "DigitsVelocity":
            return (self.channels, 1, 8, 8)
        depth, down, across = self.family.patch_of(self.config)
        for name, value, factor in (("height", height, self.space * down), ("width", width, self.space * across)):
            if not is_integer(value) or value < 1 or value % factor:
                raise InputError(name, value, f"a positive multiple of {factor} for {self.name}")
        if self.time == 1 and frames != 1:
            raise InputError("frames", frames, f"1: {self.name} is a model of images")
        if not is_integer(frames) or frames < 1 or (frames - 1) % self.time or ((frames - 1) // self.time + 1) % depth:
            raise InputError("frames", frames, f"1 + n·{self.time} for {self.name}")
        return (self.channels, (frames - 1) // self.time + 1, height // self.space, width // self.space)

    def tokens(self, latent: tuple[int, int, int, int]) -> int:
        """Tokens of a latent."""
        if self.kind == "DigitsVelocity":
            return math.prod(latent)
        return math.prod(side // part for side, part in zip(latent[1:], self.family.patch_of(self.config), strict=True))


FLUX = {
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}
SD3 = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
}
SD35_MEDIUM = SD3 | {"qk_norm": "rms_norm", "dual_attention_layers": tuple(range(13))}
SD35_LARGE = SD3 | {
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "qk_norm": "rms_norm",
}
QWEN_IMAGE = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
}
WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 8960,
    "num_layers": 30,
    "cross_attn_norm": True,
}
WAN_14B = WAN | {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
DIGITS = {"width": 128, "hidden": 256, "blocks": 3, "frequencies": 32}

KNOWN = {
    found.name: found
    for found in (
        Architecture("flux.1-dev", "FluxTransformer2DModel", FLUX, 16),
        Architecture("sd3-medium", "SD3Transformer2DModel", SD3, 16),
        Architecture("sd3.5-medium", "SD3Transformer2DModel", SD35_MEDIUM, 16),
        Architecture("sd3.5-large", "SD3Transformer2DModel", SD35_LARGE, 16),
        Architecture("qwen-image", "QwenImageTransformer2DModel", QWEN_IMAGE, 16),
        Architecture("wan2.1-1.3b", "WanTransformer3DModel", WAN, 16, time=4),
        Architecture("wan2.1-14b", "WanTransformer3DModel", WAN_14B, 16, time=4),
        Architecture("digits", "DigitsVelocity", DIGITS, 1, space=1),
    )
}
"""Public configurations (``transformer/config.json`` of the published pipelines), by the name a planner takes."""

PUBLISHED = {
    "black-forest-labs/flux.1-dev": "flux.1-dev",
    "stabilityai/stable-diffusion-3-medium-diffusers": "sd3-medium",
    "stabilityai/stable-diffusion-3.5-medium": "sd3.5-medium",
    "stabilityai/stable-diffusion-3.5-large": "sd3.5-large",
    "qwen/qwen-image": "qwen-image",
    "wan-ai/wan2.1-t2v-1.3b-diffusers": "wan2.1-1.3b",
    "wan-ai/wan2.1-t2v-14b-diffusers": "wan2.1-14b",
}
"""Hub ids of these configurations, in lower case."""


def architecture(source: str) -> Architecture:
    """A backbone by name, hub id, or the folder of a diffusers pipeline; nothing is loaded and nothing downloaded.

    The ``tiny-`` pipelines are built in the project's cache.

    Raises:
        OptionError: neither a known name nor a folder.
        InputError: a folder of another kind.
    """
    name = PUBLISHED.get(source.lower(), source.lower())
    if name in KNOWN:
        return KNOWN[name]
    if name.startswith("tiny-"):
        from branchgrpo.models.tiny.folders import tiny_pipeline

        return replace(from_folder(str(tiny_pipeline(name))), name=name)
    if not Path(source).expanduser().is_dir():
        near = get_close_matches(source.lower(), KNOWN, n=1, cutoff=0.5)
        listed = f"one of {', '.join(KNOWN)}, or the folder of a diffusers pipeline"
        raise OptionError("backbone", source, f"{near[0]!r}?" if near else listed)
    return from_folder(source)


def from_folder(source: str) -> Architecture:
    """A backbone from the configurations of a pipeline's folder.

    Raises:
        InputError: no pipeline, or a transformer of an unknown class.
    """
    from branchgrpo.models.folder import PipelineFolder

    folder = PipelineFolder.resolve(Path(source))
    kind = folder.component_class("transformer")
    if kind not in FAMILIES:
        listed = ", ".join(name for name in FAMILIES if name.endswith("Model"))
        raise InputError(f"{source}: transformer", kind, f"one of {listed}")
    config, vae = folder.config("transformer"), folder.config("vae")
    stages = vae.get("block_out_channels") or vae["dim_mult"]
    space = vae.get("scale_factor_spatial") or 2 ** (len(stages) - 1)
    packed = 4 if kind in ("FluxTransformer2DModel", "QwenImageTransformer2DModel") else 1
    found = Architecture(source, kind, config, config["in_channels"] // packed, space)
    if kind == "WanTransformer3DModel":
        time = vae.get("scale_factor_temporal", 4)
        return replace(found, time=time, experts=1 + folder.has("transformer_2"))
    return found
