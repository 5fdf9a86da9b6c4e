"""From open_clip's names to transformers': every tensor of a ViT CLIP, with its shape."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from branchgrpo.reference.errors import InputError, is_integer
from branchgrpo.rewards.checkpoint import check_shapes
from branchgrpo.rewards.extras import require

Shapes = dict[str, tuple[int, ...]]
IGNORED = frozenset({"attn_mask"})
"""A buffer that some open_clip versions store; it is the causal mask and nothing else."""


@dataclass(frozen=True)
class OpenClipShape:
    """Sizes of an open_clip ViT CLIP; the MLPs are four times as wide as the residual stream."""

    embed_dim: int
    image_size: int
    patch_size: int
    vision_width: int
    vision_layers: int
    vision_heads: int
    text_width: int
    text_layers: int
    text_heads: int
    context_length: int = 77
    vocab_size: int = 49408

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not is_integer(value) or value < 1:
                raise InputError(f"open_clip.{field.name}", value, "an integer ≥ 1")
        for tower in ("vision", "text"):
            width, heads = getattr(self, f"{tower}_width"), getattr(self, f"{tower}_heads")
            if width % heads:
                raise InputError(f"open_clip.{tower}_heads", heads, f"a divisor of the width {width}")

    @property
    def positions(self) -> int:
        """Image tokens: the class token and one a patch."""
        return (self.image_size // self.patch_size) ** 2 + 1


VIT_H_14 = OpenClipShape(
    embed_dim=1024,
    image_size=224,
    patch_size=14,
    vision_width=1280,
    vision_layers=32,
    vision_heads=16,
    text_width=1024,
    text_layers=24,
    text_heads=16,
)
"""The architecture of HPS v2.x (open_clip's ViT-H-14: 80-wide heads in the image tower, 64-wide in the text tower)."""


def block_shapes(prefix: str, layers: int, width: int) -> Shapes:
    """Tensors of a stack of residual attention blocks."""
    block: Shapes = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.in_proj_weight": (3 * width, width),
        "attn.in_proj_bias": (3 * width,),
        "attn.out_proj.weight": (width, width),
        "attn.out_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (4 * width, width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (width, 4 * width),
        "mlp.c_proj.bias": (width,),
    }
    return {f"{prefix}.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}


def open_clip_shapes(shape: OpenClipShape) -> Shapes:
    """Every tensor of open_clip's state dict, with its shape."""
    vision, text = shape.vision_width, shape.text_width
    return {
        "positional_embedding": (shape.context_length, text),
        "text_projection": (text, shape.embed_dim),
        "logit_scale": (),
        "token_embedding.weight": (shape.vocab_size, text),
        "ln_final.weight": (text,),
        "ln_final.bias": (text,),
        "visual.class_embedding": (vision,),
        "visual.positional_embedding": (shape.positions, vision),
        "visual.proj": (vision, shape.embed_dim),
        "visual.conv1.weight": (vision, 3, shape.patch_size, shape.patch_size),
        "visual.ln_pre.weight": (vision,),
        "visual.ln_pre.bias": (vision,),
        "visual.ln_post.weight": (vision,),
        "visual.ln_post.bias": (vision,),
        **block_shapes("visual.transformer.resblocks", shape.vision_layers, vision),
        **block_shapes("transformer.resblocks", shape.text_layers, text),
    }


PLAIN = {
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
}
"""Tensors (or modules) that only change their name."""

TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
"""open_clip multiplies by these from the right, a Linear from the left."""

TOWERS = {
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "transformer.resblocks.": "text_model.encoder.layers.",
}
BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def convert_tensor(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """One open_clip tensor under its transformers names: three of them for a fused query-key-value."""
    if key in TRANSPOSED:
        return {TRANSPOSED[key]: tensor.t().contiguous()}
    for source, target in TOWERS.items():
        if key.startswith(source):
            layer, _, rest = key.removeprefix(source).partition(".")
            return {f"{target}{layer}.{name}": t for name, t in convert_block(rest, tensor).items()}
    module, _, leaf = key.rpartition(".")
    return {PLAIN[key] if key in PLAIN else f"{PLAIN[module]}.{leaf}": tensor}


def convert_block(rest: str, tensor: Tensor) -> dict[str, Tensor]:
    """One tensor of a residual block."""
    if rest.startswith("attn.in_proj_"):
        leaf = rest.removeprefix("attn.in_proj_")
        parts = zip("qkv", tensor.chunk(3, dim=0), strict=True)
        return {f"self_attn.{name}_proj.{leaf}": part.contiguous() for name, part in parts}
    module, _, leaf = rest.rpartition(".")
    return {f"{BLOCK[module]}.{leaf}": tensor}


def convert_open_clip(name: str, state: Mapping[str, Tensor], shape: OpenClipShape) -> dict[str, Tensor]:
    """The state dict of ``transformers.CLIPModel`` for an open_clip ViT checkpoint.

    Formula: in_proj = [W_q; W_k; W_v] is split in three, both projections are transposed, the rest is renamed.

    Raises:
        InputError: a missing, unknown or misshapen tensor, by name.
    """
    kept = {key: tensor for key, tensor in state.items() if key not in IGNORED}
    check_shapes(name, kept, open_clip_shapes(shape))
    converted: dict[str, Tensor] = {}
    for key, tensor in kept.items():
        converted |= convert_tensor(key, tensor)
    return converted


def clip_config(shape: OpenClipShape) -> Any:
    """The transformers configuration of an open_clip ViT: exact GELU, the end token last in the vocabulary."""
    library = require("transformers", "rewards")
    text = library.CLIPTextConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.text_width,
        intermediate_size=4 * shape.text_width,
        projection_dim=shape.embed_dim,
        num_hidden_layers=shape.text_layers,
        num_attention_heads=shape.text_heads,
        max_position_embeddings=shape.context_length,
        hidden_act="gelu",
        bos_token_id=shape.vocab_size - 2,
        eos_token_id=shape.vocab_size - 1,
        pad_token_id=shape.vocab_size - 1,
    )
    vision = library.CLIPVisionConfig(
        hidden_size=shape.vision_width,
        intermediate_size=4 * shape.vision_width,
        projection_dim=shape.embed_dim,
        num_hidden_layers=shape.vision_layers,
        num_attention_heads=shape.vision_heads,
        image_size=shape.image_size,
        patch_size=shape.patch_size,
        hidden_act="gelu",
    )
    return library.CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=shape.embed_dim
    )
