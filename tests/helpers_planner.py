"""Transformers of every family at a size that separates widths, with what a call of each needs."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import diffusers
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from branchgrpo.models.digits import DigitsConfig, DigitsVelocity
from branchgrpo.reference.protocols import TensorCondition

ITEMS, TEXT = 2, 60
HEADS = {"num_attention_heads": 4, "attention_head_dim": 32}
JOINT = {"joint_attention_dim": 96, **HEADS}
SD3 = {
    "sample_size": 32,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 4,
    "caption_projection_dim": 128,
    "pooled_projection_dim": 48,
    "pos_embed_max_size": 32,
    **JOINT,
}
FLUX = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "pooled_projection_dim": 48,
    "axes_dims_rope": (8, 12, 12),
    **JOINT,
}
QWEN = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 4,
    "axes_dims_rope": (8, 12, 12),
    **JOINT,
}
WAN = {
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 96,
    "freq_dim": 64,
    "ffn_dim": 512,
    "num_layers": 4,
    "rope_max_seq_len": 32,
    **HEADS,
}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def call_flux(m: nn.Module, dtype: torch.dtype) -> Tensor:
    return m(
        hidden_states=random(ITEMS, 240, 16, dtype=dtype),
        encoder_hidden_states=random(ITEMS, TEXT, 96, dtype=dtype),
        pooled_projections=random(ITEMS, 48, dtype=dtype),
        timestep=torch.full((ITEMS,), 0.5, dtype=dtype),
        guidance=torch.ones(ITEMS, dtype=dtype) if m.config.guidance_embeds else None,
        img_ids=torch.zeros(240, 3),
        txt_ids=torch.zeros(TEXT, 3),
        return_dict=False,
    )[0]


def call_sd3(m: nn.Module, dtype: torch.dtype) -> Tensor:
    return m(
        hidden_states=random(ITEMS, 4, 24, 40, dtype=dtype),
        encoder_hidden_states=random(ITEMS, TEXT, 96, dtype=dtype),
        pooled_projections=random(ITEMS, 48, dtype=dtype),
        timestep=torch.full((ITEMS,), 500.0, dtype=dtype),
        return_dict=False,
    )[0]


def call_qwen(m: nn.Module, dtype: torch.dtype) -> Tensor:
    return m(
        hidden_states=random(ITEMS, 240, 16, dtype=dtype),
        encoder_hidden_states=random(ITEMS, TEXT, 96, dtype=dtype),
        encoder_hidden_states_mask=None,
        timestep=torch.full((ITEMS,), 0.5, dtype=dtype),
        img_shapes=[[(1, 12, 20)]] * ITEMS,
        return_dict=False,
    )[0]


def call_wan(m: nn.Module, dtype: torch.dtype) -> Tensor:
    x, text = random(ITEMS, 16, 4, 12, 20, dtype=dtype), random(ITEMS, TEXT, 96, dtype=dtype)
    return m(x, torch.full((ITEMS,), 500.0), text, return_dict=False)[0]


@dataclass(frozen=True)
class Case:
    """A network: its class, configuration, tokens of the latent, and a call of ``ITEMS`` items."""

    kind: str
    config: dict
    call: Callable[[nn.Module, torch.dtype], Tensor]
    image: int = 240
    unread: str | None = r"transformer_blocks\.3\.attn\.(add_q_proj|to_add_out)"

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(0)
        return getattr(diffusers, self.kind)(**self.config).to(dtype)


CASES = {
    "flux": Case("FluxTransformer2DModel", FLUX | {"guidance_embeds": True}, call_flux, unread=None),
    "flux-schnell": Case("FluxTransformer2DModel", FLUX, call_flux, unread=None),
    "sd3": Case("SD3Transformer2DModel", SD3, call_sd3),
    "sd3.5": Case("SD3Transformer2DModel", SD3 | {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)}, call_sd3),
    "qwen": Case("QwenImageTransformer2DModel", QWEN, call_qwen),
    "wan": Case("WanTransformer3DModel", WAN, call_wan, unread=None),
    "wan-no-cross-norm": Case("WanTransformer3DModel", WAN | {"cross_attn_norm": False}, call_wan, unread=None),
}


def digits_network() -> tuple[DigitsVelocity, Callable[[nn.Module, torch.dtype], Tensor]]:
    """The digits' network at its own size, and a call of it."""

    def call(m: nn.Module, dtype: torch.dtype) -> Tensor:
        condition = TensorCondition({"label": torch.zeros(ITEMS, dtype=torch.int64)})
        return m(random(ITEMS, 1, 8, 8, dtype=dtype), torch.full((ITEMS,), 0.5, dtype=dtype), condition)

    return DigitsVelocity(DigitsConfig()), call


def counted_flops(call: Callable[[nn.Module, torch.dtype], Tensor], model: nn.Module) -> tuple[int, int]:
    """FLOPs of a forward pass, and of the backward pass behind it, as PyTorch counts them."""
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            call(model, torch.float32)
        with FlopCounterMode(display=False) as both:
            call(model, torch.float32).sum().backward()
    return forward.get_total_flops(), both.get_total_flops() - forward.get_total_flops()


def saved_bytes(
    call: Callable[[nn.Module, torch.dtype], Tensor],
    model: nn.Module,
    dtype: torch.dtype,
    autocast: torch.dtype | None = None,
) -> int:
    """Bytes of all storages that autograd keeps, weights and their low-precision copies apart."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    sizes = {p.numel() * 2 for p in model.parameters() if p.ndim > 1} if autocast else set()
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage().data_ptr()
        copy = tensor.dtype == autocast and tensor.untyped_storage().nbytes() in sizes
        if tensor.is_floating_point() and key not in own and not copy:
            found[key] = tensor
        return tensor

    lower = torch.autocast("cpu", dtype=autocast) if autocast else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), lower:
        call(model, dtype)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())
