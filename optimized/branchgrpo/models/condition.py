"""The condition that a backbone's encoders make, which knows whose it is."""

import dataclasses
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Int64
from torch import Tensor

from branchgrpo.reference.protocols import TensorCondition

NEGATIVE = "negative_"
"""Prefix of the tensors of the unconditional branch."""


@dataclass(frozen=True, eq=False)
class EncodedCondition(TensorCondition):
    """Encoded prompts, one an item.

    Attributes:
        family: backbone family that can read it.
        fingerprint: hash of the encoders that made it.
    """

    family: str = ""
    fingerprint: str = ""

    def gather(self, index: Int64[Tensor, "items"]) -> Self:
        """Select along the first dimension of every tensor, whichever device it is on."""
        taken = {name: t.index_select(0, index.to(t.device)) for name, t in self.tensors.items()}
        return dataclasses.replace(self, tensors=taken)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move everything but the integer lengths, which stay on the CPU; cast floating tensors only."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype) if tensor.is_floating_point() else tensor

        return dataclasses.replace(self, tensors={name: moved(t) for name, t in self.tensors.items()})
