"""Tiny real pipelines with random weights, built offline, saved to a folder and loaded from it."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import nn
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from branchgrpo.reference.protocols import Guidance

PROMPTS = ("a red cube on a table", "two green birds singing in the rain at night", "blue sky")
NEGATIVE = "blurry, low quality"
QWEN_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
CORPUS = [*PROMPTS, NEGATIVE, QWEN_TEMPLATE.replace("<|im_start|>", "").replace("<|im_end|>", "")]
WORDS = Regex(r"[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
QWEN_WORDS = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def trained(tokenizer: Tokenizer, trainer: object) -> dict:
    """The model part of a tokenizer trained on the corpus."""
    tokenizer.train_from_iterator(CORPUS, trainer)
    return json.loads(tokenizer.to_str())["model"]


def clip_tokenizer() -> CLIPTokenizer:
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "removed", invert=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<|startoftext|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    model = trained(tokenizer, trainer)
    return CLIPTokenizer(vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]], model_max_length=16)


def t5_tokenizer() -> T5Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    model = trained(tokenizer, trainer)
    return T5Tokenizer(vocab=[tuple(v) for v in model["vocab"]], extra_ids=0, model_max_length=64)


def qwen_tokenizer() -> Qwen2Tokenizer:
    """A tokenizer whose prompt template takes the 34 tokens that the pipeline drops."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(QWEN_WORDS, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model = trained(tokenizer, trainer)
    vocab = dict(model["vocab"])
    vocab["<|endoftext|>"] = len(vocab)
    result = Qwen2Tokenizer(vocab=vocab, merges=[tuple(m) for m in model["merges"]])
    result.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    prefix = QWEN_TEMPLATE.split("{}")[0]
    assert len(result(prefix).input_ids) == 34, result.tokenize(prefix)
    return result


def randomize(module: nn.Module, seed: int) -> nn.Module:
    """Give every parameter random values, none of them zero-initialised, with outputs of order one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise / max(1.0, parameter[0].numel() ** 0.5))
            else:
                parameter.copy_(0.1 * noise + (1.0 if name.endswith("weight") and "norm" in name else 0.0))
    return module.eval()


def clip_text(tokenizer: CLIPTokenizer, cls: type) -> nn.Module:
    config = CLIPTextConfig(
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
    return randomize(cls(config), 11)


def t5_text(tokenizer: T5Tokenizer, width: int, umt5: bool = False) -> nn.Module:
    cls, config = (UMT5EncoderModel, UMT5Config) if umt5 else (T5EncoderModel, T5Config)
    sizes = {"d_model": width, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
    return randomize(cls(config(vocab_size=len(tokenizer), decoder_start_token_id=0, **sizes)), 12)


def kl_vae(**extra: float) -> nn.Module:
    """An image VAE that halves each side (one down block)."""
    vae = AutoencoderKL(
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
    return randomize(vae, 13)


def euler(**config: object) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**config)


def flux(guidance_embeds: bool = True) -> DiffusionPipeline:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = FluxTransformer2DModel(
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
    return FluxPipeline(
        scheduler=euler(shift=3.0, use_dynamic_shifting=True),
        vae=kl_vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=clip_text(clip, CLIPTextModel),
        tokenizer=clip,
        text_encoder_2=t5_text(t5, 32),
        tokenizer_2=t5,
        transformer=randomize(transformer, 1),
    )


def stable_diffusion_3(v35: bool = False, with_t5: bool = True) -> DiffusionPipeline:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = SD3Transformer2DModel(
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
    return StableDiffusion3Pipeline(
        transformer=randomize(transformer, 2),
        scheduler=euler(shift=3.0),
        vae=kl_vae(scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=clip_text(clip, CLIPTextModelWithProjection),
        tokenizer=clip,
        text_encoder_2=clip_text(clip, CLIPTextModelWithProjection),
        tokenizer_2=clip,
        text_encoder_3=t5_text(t5, 64) if with_t5 else None,
        tokenizer_3=t5 if with_t5 else None,
    )


def qwen_image() -> DiffusionPipeline:
    tokenizer = qwen_tokenizer()
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=12,
        z_dim=4,
        dim_mult=[1, 1, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 1.5, 0.7, 1.2],
    )
    size = {"hidden_size": 16, "intermediate_size": 16}
    config = Qwen2_5_VLConfig(
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
    return QwenImagePipeline(
        scheduler=euler(shift=1.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, shift_terminal=0.02),
        vae=randomize(vae, 14),
        text_encoder=randomize(Qwen2_5_VLForConditionalGeneration(config), 15),
        tokenizer=tokenizer,
        transformer=randomize(transformer, 3),
    )


def wan_transformer(seed: int, **extra: object) -> nn.Module:
    transformer = WanTransformer3DModel(
        **{
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 32,
            "freq_dim": 64,
            "ffn_dim": 32,
            "num_layers": 2,
            "rope_max_seq_len": 32,
            **extra,
        }
    )
    return randomize(transformer, seed)


def wan(image: bool = False, experts: bool = False, expand: bool = False) -> DiffusionPipeline:
    """Wan 2.1 (one expert), 2.2 (two experts) or 2.2 TI2V (a time a token), text- or image-to-video."""
    tokenizer = t5_tokenizer()
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    sees_image = image and not experts and not expand
    extra: dict[str, object] = {"in_channels": 36} if image and not expand else {}
    extra |= {"image_dim": 8, "added_kv_proj_dim": 24} if sees_image else {}
    parts: dict[str, object] = {
        "tokenizer": tokenizer,
        "text_encoder": t5_text(tokenizer, 32, umt5=True),
        "vae": randomize(vae, 16),
        "scheduler": euler(shift=3.0),
        "transformer": wan_transformer(4, **extra),
        "transformer_2": wan_transformer(5, **extra) if experts else None,
        "boundary_ratio": 0.875 if experts else None,
        "expand_timesteps": expand,
    }
    if not image:
        return WanPipeline(**parts)
    if sees_image:
        config = CLIPVisionConfig(
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
        )
        parts["image_encoder"] = randomize(CLIPVisionModel(config), 17)
        parts["image_processor"] = CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=8)
    return WanImageToVideoPipeline(**parts)


@dataclass(frozen=True)
class Row:
    """A backbone under test: a new one adds its row here, and every test of every backbone runs on it.

    Attributes:
        build: makes the tiny pipeline.
        guidance: the guidance of the shared tests.
        call: that guidance in the words of the pipeline's call.
        size: (frames, height, width) in pixels.
        image: whether it starts from an image.
        slow: whether its long tests are left out of the quick run.
        variant: only a variant of another row: kept for parity alone.
    """

    build: Callable[[], DiffusionPipeline]
    guidance: Guidance
    call: dict[str, object]
    size: tuple[int, int, int] = (1, 16, 24)
    image: bool = False
    slow: bool = False
    variant: bool = False


def guided(scale: float) -> Guidance:
    return Guidance("classifier_free", scale)


CFG = {"guidance_scale": 3.0, "negative_prompt": NEGATIVE}
VIDEO = (5, 16, 32)
ROWS = {
    "flux": Row(flux, Guidance("embedded", 3.0), {"guidance_scale": 3.0}),
    "flux-schnell": Row(lambda: flux(guidance_embeds=False), Guidance(), {}, variant=True),
    "sd3": Row(stable_diffusion_3, guided(3.0), CFG),
    "sd3.5": Row(lambda: stable_diffusion_3(v35=True), guided(3.0), CFG, variant=True),
    "sd3-no-t5": Row(lambda: stable_diffusion_3(with_t5=False), guided(3.0), CFG, variant=True),
    "qwen": Row(qwen_image, guided(3.0), {"true_cfg_scale": 3.0, "negative_prompt": NEGATIVE}),
    "wan2.1": Row(wan, guided(3.0), CFG, VIDEO),
    "wan2.2": Row(lambda: wan(experts=True), guided(3.0), CFG, VIDEO),
    "wan2.2-5b": Row(lambda: wan(expand=True), guided(3.0), CFG, VIDEO, slow=True),
    "wan2.1-i2v": Row(lambda: wan(image=True), guided(3.0), CFG, VIDEO, image=True, slow=True),
    "wan2.2-i2v": Row(lambda: wan(image=True, experts=True), guided(3.0), CFG, VIDEO, image=True, variant=True),
    "wan2.2-5b-i2v": Row(lambda: wan(image=True, expand=True), guided(3.0), CFG, VIDEO, image=True, slow=True),
}
KINDS = [kind for kind, row in ROWS.items() if not row.variant]
QUICK = [pytest.param(kind, marks=pytest.mark.slow) if ROWS[kind].slow else kind for kind in KINDS]


def saved(kind: str, root: Path) -> Path:
    """The folder of a tiny pipeline, built on the first request."""
    folder = root / kind
    if not folder.exists():
        ROWS[kind].build().save_pretrained(folder)
    return folder


def image(seed: int = 0, size: tuple[int, int] = (40, 56)) -> Image.Image:
    """A picture with structure of its own."""
    noise = torch.rand(size[0] // 8, size[1] // 8, 3, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray((255 * noise).byte().numpy()).resize(size[::-1])


def first_frames(kind: str, size: tuple[int, int, int], count: int) -> dict[str, object]:
    """The arguments that ``encode`` needs besides the prompts."""
    return {"images": [image(i) for i in range(count)], "size": size} if ROWS[kind].image else {}


@contextmanager
def no_network() -> Iterator[None]:
    """Every attempt to open a connection or to resolve a name raises."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("reached for the network")

    kept = socket.socket.connect, socket.getaddrinfo
    socket.socket.connect, socket.getaddrinfo = refuse, refuse
    try:
        yield
    finally:
        socket.socket.connect, socket.getaddrinfo = kept
