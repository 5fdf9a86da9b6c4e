"""Several processes that work on one update: what they count, gather and agree on (spec: rollout, objective)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.reference.errors import BranchGRPOError, InputError, is_integer


@dataclass(frozen=True)
class Share:
    """Which sub-trees of large trees a rank grows: an equal, contiguous range of the nodes at one depth.

    Nodes above that depth are grown by every rank; they are few.

    Attributes:
        rank, size: this process and the number of processes.
        depth: of the nodes that are dealt out.
    """

    rank: int
    size: int
    depth: int

    def __post_init__(self) -> None:
        if not is_integer(self.size) or self.size < 1:
            raise InputError("share.size", self.size, "an integer ≥ 1")
        if not is_integer(self.rank) or not 0 <= self.rank < self.size:
            raise InputError("share.rank", self.rank, f"an integer in 0..{self.size - 1}")
        if not is_integer(self.depth) or self.depth < 0:
            raise InputError("share.depth", self.depth, "an integer ≥ 0")

    def owned(self, nodes: int) -> range:
        """The rank's range of ``nodes`` flat indices at the shared depth."""
        return range(nodes * self.rank // self.size, nodes * (self.rank + 1) // self.size)


@dataclass(frozen=True)
class Ranks:
    """The processes of one update. Every method is a collective: all ranks call it, in the same order.

    Attributes:
        rank, size: this process and the number of processes.
        group: process group; None is the default group.
        averaged: the model's wrapper (DDP, FSDP2) averages gradients over the ranks; False means that the caller sums.
    """

    rank: int
    size: int
    group: Any | None = None
    averaged: bool = True

    @classmethod
    def of_group(cls, group: Any | None = None, *, averaged: bool = True) -> "Ranks":
        """The ranks of a process group that is already initialised."""
        return cls(dist.get_rank(group), dist.get_world_size(group), group, averaged)

    def everyone(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, error: BranchGRPOError | None) -> None:
        """Raise the lowest rank's error on every rank, or return on every rank: none is left waiting.

        Clause: ERR-3, ERR-4.
        """
        for found in self.everyone(error):
            if found is not None:
                raise found

    def total(self, count: int) -> int:
        """Sum of a count."""
        return sum(self.everyone(count))

    def largest(self, count: int) -> int:
        """Largest of a count."""
        return int(max(self.everyone(count)))

    def merged(self, entries: Mapping[int, float]) -> dict[int, float]:
        """Union of small dictionaries that agree where they overlap."""
        return {key: value for mine in self.everyone(dict(entries)) for key, value in sorted(mine.items())}

    def rows(self, tensor: Float64[Tensor, "rows *rest"]) -> Float64[Tensor, "all_rows *rest"]:
        """The rows of all ranks, in rank order; their number may differ from rank to rank."""
        return torch.cat(self.everyone(tensor.cpu()))

    def first_row(self, rows: int) -> int:
        """Where this rank's rows start among those of all ranks."""
        return int(sum(self.everyone(rows)[: self.rank]))

    def summed(self, tensor: Float64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
        """Sum over the ranks; exact where at most one rank's entry is not 0."""
        result = tensor.cpu().contiguous().clone()
        dist.all_reduce(result, group=self.group)
        return result
