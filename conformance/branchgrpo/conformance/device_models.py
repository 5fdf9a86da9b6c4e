"""The arithmetic that the device table tries: its variants, and one network that can be computed in each of them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.conformance.case import Case
from branchgrpo.conformance.cases import SDE, method, tree
from branchgrpo.conformance.subjects import Slope
from branchgrpo.optimized.rollout import COMPILE_FROM
from branchgrpo.reference.options import Fusion, Objective
from branchgrpo.reference.protocols import Condition, Guidance, TensorCondition

PROMPTS, HIDDEN = 4, 16
SMALL = (8, 16)
"""Shape of a state; its size and ``HIDDEN`` are multiples of 16, as matrix units ask for."""

WIDE = (COMPILE_FROM // (2 * PROMPTS) // 256, 256)
"""Shape of a state from which the batched path compiles its step, from the first split on."""

TF32_DROPPED = 13
"""Bits of float32's 23 that TF32 does not have."""


@dataclass(frozen=True)
class Variant:
    """One way to do the arithmetic.

    Attributes:
        name: what the table calls it.
        dtype: of the arithmetic, of stored states and of parameters.
        compute: of the network.
        tf32: whether float32 matrix products may drop bits of their operands.
        compiled: whether the implementation is asked to compile.
    """

    name: str
    dtype: torch.dtype
    compute: torch.dtype
    tf32: bool = False
    compiled: bool = False

    def case(self, device: torch.device, dtype: torch.dtype | None = None) -> Case:
        """The case that the variant is tried on: a tree of four leaves a prompt, one reward, a clip never reached."""
        wide = Objective(clip_low=0.5, clip_high=0.5)
        chosen = method("device", tree(SDE), fusion=Fusion(beta=1.0), objective=wide)
        kind = dtype or self.dtype
        latent = WIDE if self.compiled else SMALL
        return Case(chosen, (Slope(),), (1.0,), PROMPTS, latent, kind, kind, device=device)


VARIANTS = (
    Variant("float64", torch.float64, torch.float64),
    Variant("float32", torch.float32, torch.float32),
    Variant("float32 with TF32", torch.float32, torch.float32, tf32=True),
    Variant("bf16 denoiser", torch.float32, torch.bfloat16),
    Variant("compiled float64", torch.float64, torch.float64, compiled=True),
    Variant("compiled float32", torch.float32, torch.float32, compiled=True),
)
"""The rows' variants; ``float32`` is with TF32 off."""


def truncated(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """A float32 tensor as TF32 holds it, its last bits cut off: the coarser of the ways in which devices do it."""
    return (x.contiguous().view(torch.int32) & -(1 << TF32_DROPPED)).view(torch.float32)


class TruncatedProduct(torch.autograd.Function):
    """a·b with the operands of all three products, forward and backward, cut to TF32."""

    @staticmethod
    def forward(ctx: Any, a: Float[Tensor, "n m"], b: Float[Tensor, "m k"]) -> Float[Tensor, "n k"]:
        """The product."""
        ctx.save_for_backward(a, b)
        return truncated(a) @ truncated(b)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of both operands."""
        a, b = ctx.saved_tensors
        (gradient,) = gradients
        cut = truncated(gradient)
        return cut @ truncated(b.mT), truncated(a.mT) @ cut


class DeviceNetwork(torch.nn.Module):
    """A small smooth velocity, computed in a dtype of its own; the same weights every time.

    Args:
        variant: parameters and arithmetic.
        elements: D, the number of latent elements.
        backwards: sum every product from its other end; equal but for rounding.
        emulated: cut operands to TF32 in software, where the variant has TF32: what a device without it computes.
        exact: float64 throughout, whatever the variant.
    """

    guidance = Guidance()

    def __init__(
        self,
        variant: Variant,
        elements: int,
        *,
        backwards: bool = False,
        emulated: bool = False,
        exact: bool = False,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(21)
        sizes = ((elements, HIDDEN), (2, HIDDEN), (HIDDEN, elements))
        inner, mixed, outer = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
        dtype = torch.float64 if exact else variant.dtype
        self.inner = torch.nn.Parameter((inner / math.sqrt(elements)).to(dtype))
        self.mixed = torch.nn.Parameter(mixed.to(dtype))
        self.outer = torch.nn.Parameter((0.2 * outer).to(dtype))
        self.compute = torch.float64 if exact else variant.compute
        self.backwards, self.emulated = backwards, emulated and variant.tf32 and not exact

    def product(self, a: Float[Tensor, "n m"], b: Float[Tensor, "m k"]) -> Float[Tensor, "n k"]:
        """a·b, summed from either end, cut to TF32 or not."""
        if self.backwards:
            a, b = a.flip(1), b.flip(0)
        found: Tensor = TruncatedProduct.apply(a, b) if self.emulated else a @ b  # type: ignore[no-untyped-call]
        return found

    def forward(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """tanh of a linear map of (x, σ, label), mapped back to the latent's shape, in the dtype of x."""
        assert isinstance(condition, TensorCondition)
        flat = x.flatten(1).to(self.compute)
        level = torch.stack([sigma.to(x.dtype), condition.tensors["label"].to(x.dtype)], dim=1).to(self.compute)
        inner, mixed, outer = (weight.to(self.compute) for weight in (self.inner, self.mixed, self.outer))
        hidden = torch.tanh(self.product(flat, inner) + self.product(level, mixed))
        return (self.product(hidden, outer) + 0.3 * flat).to(x.dtype).view_as(x)
