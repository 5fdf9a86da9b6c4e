"""From ImageReward's names to transformers' BLIP: every tensor of its two towers, with its shape."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from branchgrpo.reference.errors import InputError, is_integer
from branchgrpo.rewards.checkpoint import check_shapes
from branchgrpo.rewards.extras import require
from branchgrpo.rewards.linear_head import head_shapes

Shapes = dict[str, tuple[int, ...]]
IGNORED = frozenset(
    {
        "blip.text_encoder.embeddings.position_ids",
        "blip.vision_proj.weight",
        "blip.vision_proj.bias",
        "blip.text_proj.weight",
        "blip.text_proj.bias",
    }
)
"""Tensors that the published checkpoint holds and the score does not use."""


@dataclass(frozen=True)
class BlipShape:
    """Sizes of ImageReward's BLIP; the MLPs are four times as wide as the residual stream."""

    image_size: int = 224
    patch_size: int = 16
    vision_width: int = 1024
    vision_layers: int = 24
    vision_heads: int = 16
    text_width: int = 768
    text_layers: int = 12
    text_heads: int = 12
    vocab_size: int = 30524
    positions: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not is_integer(value) or value < 1:
                raise InputError(f"blip.{field.name}", value, "an integer ≥ 1")

    @property
    def patches(self) -> int:
        """Image tokens: the class token and one a patch."""
        return (self.image_size // self.patch_size) ** 2 + 1


def with_bias(name: str, outputs: int, inputs: int) -> Shapes:
    """Weight and bias of an affine layer."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name: str, width: int) -> Shapes:
    """Weight and bias of a layer norm."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def vision_block(width: int) -> Shapes:
    """Tensors of one block of the image tower."""
    return {
        **norm("norm1", width),
        **with_bias("attn.qkv", 3 * width, width),
        **with_bias("attn.proj", width, width),
        **norm("norm2", width),
        **with_bias("mlp.fc1", 4 * width, width),
        **with_bias("mlp.fc2", width, 4 * width),
    }


def text_block(width: int, vision_width: int) -> Shapes:
    """Tensors of one block of the text tower: self-attention, attention to the image, MLP."""
    shapes: Shapes = {}
    for name, keys in (("attention", width), ("crossattention", vision_width)):
        shapes |= with_bias(f"{name}.self.query", width, width)
        shapes |= with_bias(f"{name}.self.key", width, keys) | with_bias(f"{name}.self.value", width, keys)
        shapes |= with_bias(f"{name}.output.dense", width, width) | norm(f"{name}.output.LayerNorm", width)
    shapes |= with_bias("intermediate.dense", 4 * width, width)
    return shapes | with_bias("output.dense", width, 4 * width) | norm("output.LayerNorm", width)


def image_reward_shapes(shape: BlipShape) -> Shapes:
    """Every tensor of ImageReward's state dict that its score uses, with its shape."""
    width, vision, text = shape.text_width, shape.vision_width, "blip.text_encoder"
    shapes: Shapes = {
        "blip.visual_encoder.cls_token": (1, 1, vision),
        "blip.visual_encoder.pos_embed": (1, shape.patches, vision),
        "blip.visual_encoder.patch_embed.proj.weight": (vision, 3, shape.patch_size, shape.patch_size),
        "blip.visual_encoder.patch_embed.proj.bias": (vision,),
        **norm("blip.visual_encoder.norm", vision),
        f"{text}.embeddings.word_embeddings.weight": (shape.vocab_size, width),
        f"{text}.embeddings.position_embeddings.weight": (shape.positions, width),
        **norm(f"{text}.embeddings.LayerNorm", width),
    }
    for i in range(shape.vision_layers):
        shapes |= {f"blip.visual_encoder.blocks.{i}.{k}": s for k, s in vision_block(vision).items()}
    for i in range(shape.text_layers):
        shapes |= {f"{text}.encoder.layer.{i}.{k}": s for k, s in text_block(width, vision).items()}
    return shapes | {f"mlp.{k}": s for k, s in head_shapes(width).items()}


VISION = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj": "embeddings.patch_embedding",
    "norm": "post_layernorm",
}
VISION_BLOCK = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
}


def vision_name(key: str) -> str:
    """Name of an image-tower tensor in ``transformers.BlipVisionModel``."""
    if key in VISION:
        return VISION[key]
    module, _, leaf = key.rpartition(".")
    if module in VISION:
        return f"{VISION[module]}.{leaf}"
    layer, _, rest = module.removeprefix("blocks.").partition(".")
    return f"encoder.layers.{layer}.{VISION_BLOCK.get(rest, rest)}.{leaf}"


def convert_image_reward(
    name: str, state: Mapping[str, Tensor], shape: BlipShape
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """State dicts of ``BlipVisionModel``, ``BlipTextModel`` and the head for an ImageReward checkpoint.

    Raises:
        InputError: a missing, unknown or misshapen tensor, by name.
    """
    kept = {key: tensor for key, tensor in state.items() if key not in IGNORED}
    check_shapes(name, kept, image_reward_shapes(shape))
    vision, text, head = (
        {key.removeprefix(prefix): tensor for key, tensor in kept.items() if key.startswith(prefix)}
        for prefix in ("blip.visual_encoder.", "blip.text_encoder.", "mlp.")
    )
    return {vision_name(key): tensor for key, tensor in vision.items()}, text, head


def blip_configs(shape: BlipShape) -> tuple[Any, Any]:
    """The transformers configurations: image norm ε 1e-6, text norm ε 1e-12, both with exact GELU, as published."""
    library = require("transformers", "rewards")
    vision = library.BlipVisionConfig(
        hidden_size=shape.vision_width,
        intermediate_size=4 * shape.vision_width,
        num_hidden_layers=shape.vision_layers,
        num_attention_heads=shape.vision_heads,
        image_size=shape.image_size,
        patch_size=shape.patch_size,
        hidden_act="gelu",
        layer_norm_eps=1e-6,
    )
    text = library.BlipTextConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.text_width,
        encoder_hidden_size=shape.vision_width,
        intermediate_size=4 * shape.text_width,
        num_hidden_layers=shape.text_layers,
        num_attention_heads=shape.text_heads,
        max_position_embeddings=shape.positions,
        hidden_act="gelu",
        layer_norm_eps=1e-12,
        is_decoder=True,
    )
    return vision, text
