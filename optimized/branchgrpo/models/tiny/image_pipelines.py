"""Tiny FLUX, Stable Diffusion 3 and Qwen-Image pipelines with random weights."""

from typing import Any

from branchgrpo.models.tiny.parts import clip_text, euler, kl_vae, library, randomize, t5_text
from branchgrpo.models.tiny.tokenizers import clip_tokenizer, qwen_tokenizer, t5_tokenizer


def flux(seed: int = 0, guidance_embeds: bool = True) -> Any:
    """A FLUX pipeline: with an embedded guidance as FLUX.1-dev, or without as FLUX.1-schnell."""
    diffusers = library("diffusers")
    transformers = library("transformers")

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=guidance_embeds,
    )
    return diffusers.FluxPipeline(
        scheduler=euler(shift=3.0, use_dynamic_shifting=True),
        vae=kl_vae(seed, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=clip_text(clip, transformers.CLIPTextModel, seed),
        tokenizer=clip,
        text_encoder_2=t5_text(t5, 32, seed),
        tokenizer_2=t5,
        transformer=randomize(transformer, seed + 1),
    )


def stable_diffusion_3(seed: int = 0, v35: bool = False, with_t5: bool = True) -> Any:
    """A Stable Diffusion 3 pipeline; ``v35`` normalises queries and keys and attends twice, as 3.5-medium does."""
    diffusers = library("diffusers")
    transformers = library("transformers")

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        pos_embed_max_size=12,
        **({"qk_norm": "rms_norm", "dual_attention_layers": (0,)} if v35 else {}),
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=randomize(transformer, seed + 2),
        scheduler=euler(shift=3.0),
        vae=kl_vae(seed, scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=clip_text(clip, transformers.CLIPTextModelWithProjection, seed),
        tokenizer=clip,
        text_encoder_2=clip_text(clip, transformers.CLIPTextModelWithProjection, seed),
        tokenizer_2=clip,
        text_encoder_3=t5_text(t5, 64, seed) if with_t5 else None,
        tokenizer_3=t5 if with_t5 else None,
    )


def qwen_image(seed: int = 0) -> Any:
    """A Qwen-Image pipeline."""
    diffusers = library("diffusers")
    transformers = library("transformers")

    tokenizer = qwen_tokenizer()
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=12,
        z_dim=4,
        dim_mult=[1, 1, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 1.5, 0.7, 1.2],
    )
    size = {"hidden_size": 16, "intermediate_size": 16}
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            **size,
            "vocab_size": len(tokenizer),
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
        },
        vision_config={**size, "depth": 1, "num_heads": 2, "out_hidden_size": 16},
    )
    return diffusers.QwenImagePipeline(
        scheduler=euler(shift=1.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, shift_terminal=0.02),
        vae=randomize(vae, seed + 14),
        text_encoder=randomize(transformers.Qwen2_5_VLForConditionalGeneration(config), seed + 15),
        tokenizer=tokenizer,
        transformer=randomize(transformer, seed + 3),
    )
