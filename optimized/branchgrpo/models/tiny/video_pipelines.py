"""Tiny Wan pipelines with random weights."""

from typing import Any

from torch import nn

from branchgrpo.models.tiny.parts import euler, library, randomize, t5_text
from branchgrpo.models.tiny.tokenizers import t5_tokenizer


def wan_transformer(seed: int, **extra: Any) -> nn.Module:
    """A Wan transformer of two heads."""
    diffusers = library("diffusers")

    sizes: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 32,
        "freq_dim": 64,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    return randomize(diffusers.WanTransformer3DModel(**{**sizes, **extra}), seed)


def image_encoder(seed: int) -> dict[str, Any]:
    """What an image-to-video pipeline sees its first frame with."""
    transformers = library("transformers")

    config = transformers.CLIPVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    return {
        "image_encoder": randomize(transformers.CLIPVisionModel(config), seed + 17),
        "image_processor": transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=8),
    }


def wan(seed: int = 0, image: bool = False, experts: bool = False, expand: bool = False) -> Any:
    """Wan 2.1 (one expert), 2.2 (two experts) or 2.2 TI2V (a time a token), text- or image-to-video."""
    diffusers = library("diffusers")

    tokenizer = t5_tokenizer()
    vae = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    sees_image = image and not experts and not expand
    extra: dict[str, Any] = {"in_channels": 36} if image and not expand else {}
    extra |= {"image_dim": 8, "added_kv_proj_dim": 24} if sees_image else {}
    parts: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text_encoder": t5_text(tokenizer, 32, seed, umt5=True),
        "vae": randomize(vae, seed + 16),
        "scheduler": euler(shift=3.0),
        "transformer": wan_transformer(seed + 4, **extra),
        "transformer_2": wan_transformer(seed + 5, **extra) if experts else None,
        "boundary_ratio": 0.875 if experts else None,
        "expand_timesteps": expand,
    }
    if not image:
        return diffusers.WanPipeline(**parts)
    return diffusers.WanImageToVideoPipeline(**parts, **(image_encoder(seed) if sees_image else {}))
