"""Text encoders, VAEs and schedulers of tiny pipelines, with random weights."""

from importlib import import_module
from typing import Any

import torch
from torch import nn


def library(name: str) -> Any:
    """A library whose classes are not typed, imported when it is needed."""
    return import_module(name)


def randomize(module: nn.Module, seed: int) -> nn.Module:
    """Give every parameter random values, none of them zero-initialised, with outputs of order one.

    Args:
        module: changed in place, and put into evaluation mode.
        seed: of the values.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise / max(1.0, parameter[0].numel() ** 0.5))
            else:
                parameter.copy_(0.1 * noise + (1.0 if name.endswith("weight") and "norm" in name else 0.0))
    return module.eval()


def clip_text(tokenizer: Any, kind: type[nn.Module], seed: int) -> nn.Module:
    """A CLIP text model of width 32 for a tokenizer."""
    transformers = library("transformers")

    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=32,
        max_position_embeddings=16,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return randomize(kind(config), seed + 11)


def t5_text(tokenizer: Any, width: int, seed: int, umt5: bool = False) -> nn.Module:
    """A T5 or UMT5 encoder of a width for a tokenizer."""
    transformers = library("transformers")

    kind, options = (
        (transformers.UMT5EncoderModel, transformers.UMT5Config)
        if umt5
        else (transformers.T5EncoderModel, transformers.T5Config)
    )
    sizes = {"d_model": width, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
    return randomize(kind(options(vocab_size=len(tokenizer), decoder_start_token_id=0, **sizes)), seed + 12)


def kl_vae(seed: int, **extra: float) -> nn.Module:
    """An image VAE that halves each side (one down block)."""
    diffusers = library("diffusers")

    vae = diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **extra,
    )
    return randomize(vae, seed + 13)


def euler(**config: Any) -> Any:
    """A flow-matching Euler scheduler."""
    diffusers = library("diffusers")

    return diffusers.FlowMatchEulerDiscreteScheduler(**config)
