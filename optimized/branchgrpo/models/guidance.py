"""Classifier-free guidance inside one call: both branches in one batch, gradients through both."""

import math
from collections.abc import Mapping
from typing import get_args, get_type_hints

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.models.condition import NEGATIVE
from branchgrpo.models.encoding import pad_tokens
from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.reference.protocols import Guidance


def check_guidance(guidance: Guidance, kinds: tuple[str, ...]) -> None:
    """Raise ``OptionError`` unless a backbone can follow this guidance.

    Args:
        guidance: what was asked for.
        kinds: what the backbone's weights can do.
    """
    known = get_args(get_type_hints(Guidance)["kind"])
    if guidance.kind not in known or guidance.kind not in kinds:
        raise OptionError("guidance.kind", guidance.kind, f"one of {list(kinds)} for these weights")
    if not (math.isfinite(guidance.scale) and guidance.scale >= 0):
        raise OptionError("guidance.scale", guidance.scale, "finite and ≥ 0")


def positive(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The conditional branch alone."""
    return {name: t for name, t in tensors.items() if not name.startswith(NEGATIVE)}


def two_branches(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both branches in one batch, the unconditional one first; what has no negative counterpart is shared.

    Raises:
        InputError: a condition that was encoded without a negative prompt.
    """
    if not any(name.startswith(NEGATIVE) for name in tensors):
        raise InputError("condition", sorted(tensors), f"encoded with a negative prompt (names {NEGATIVE}…)")
    return {name: joined(tensors.get(NEGATIVE + name, t), t) for name, t in positive(tensors).items()}


def joined(negative: Tensor, conditional: Tensor) -> Tensor:
    """Two batches one after the other; the shorter texts are padded with zero tokens."""
    if negative.shape[1:] != conditional.shape[1:]:
        longest = max(negative.shape[1], conditional.shape[1])
        negative, conditional = pad_tokens(negative, longest), pad_tokens(conditional, longest)
    return torch.cat([negative, conditional])


def per_item(scale: Float[Tensor, "items"], like: Float[Tensor, "items *rest"]) -> Float[Tensor, "items ..."]:
    """A scalar an item, shaped to broadcast over the item's elements."""
    return scale.view(-1, *(1,) * (like.ndim - 1))


def combine(
    negative: Float[Tensor, "items *rest"], conditional: Float[Tensor, "items *rest"], scale: Float[Tensor, "items"]
) -> Float[Tensor, "items *rest"]:
    """v = v⁻ + w·(v⁺ − v⁻).  Clause: ROLL-4.  Source: classifier-free guidance (arXiv 2207.12598).

    Args:
        negative: v⁻, unconditional.
        conditional: v⁺.
        scale: w ≥ 0, one an item.
    """
    return negative + per_item(scale, negative) * (conditional - negative)


def combine_rescaled(
    negative: Float[Tensor, "items tokens channels"],
    conditional: Float[Tensor, "items tokens channels"],
    scale: Float[Tensor, "items"],
) -> Float[Tensor, "items tokens channels"]:
    """Guidance whose result has, token by token, the norm of the conditional branch (Qwen-Image)."""
    combined = combine(negative, conditional, scale)
    norm = torch.linalg.vector_norm
    ratio: Tensor = norm(conditional, dim=-1, keepdim=True) / norm(combined, dim=-1, keepdim=True)
    return combined * ratio
