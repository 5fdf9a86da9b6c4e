"""Leaves split over processes and their scores put together again, each in its own place (REW-3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.errors import InputError, RewardError, is_integer
from branchgrpo.rewards.missing import Words


@dataclass(frozen=True)
class Shard:
    """Scores of one process, with the global index of every item, or the message of why there are none.

    Attributes:
        items: global indices of this shard's items.
        scores: one row of M scores an item.
        error: message of a failure on this process; None if there was none.
    """

    items: tuple[int, ...]
    scores: tuple[tuple[float, ...], ...]
    error: str | None = None


def shard_items(total: int, rank: int, world: int) -> range:
    """The contiguous global indices of one process; sizes differ by one at most, and every index has one owner.

    Raises:
        InputError: a rank that is not in 0 … world − 1.
    """
    if not (is_integer(total) and total >= 0):
        raise InputError("total", total, "an integer ≥ 0")
    if not (is_integer(world) and world >= 1 and is_integer(rank) and 0 <= rank < world):
        raise InputError("(rank, world)", (rank, world), "integers with 0 ≤ rank < world")
    base, extra = divmod(total, world)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def as_shard(items: Sequence[int], scores: Float[Tensor, "items models"]) -> Shard:
    """A shard from the items' indices and their scores."""
    if len(items) != len(scores):
        raise InputError("len(items)", len(items), f"{len(scores)}, one a row of scores")
    return Shard(tuple(items), tuple(tuple(row) for row in scores.double().tolist()))


def merge_shards(shards: Sequence[Shard], total: int) -> Float64[Tensor, "items models"]:
    """Scores of all items in global order, whatever the order and sizes of the shards.

    Raises:
        RewardError: a shard that failed, an item scored twice, or one that no shard scored.
    """
    for rank, shard in enumerate(shards):
        if shard.error is not None:
            raise RewardError(f"rewards of shard {rank}", Words(shard.error), "one finite real a leaf and reward model")
    rows: dict[int, tuple[float, ...]] = {}
    for rank, shard in enumerate(shards):
        for item, row in zip(shard.items, shard.scores, strict=True):
            if item in rows or not 0 <= item < total:
                raise RewardError(f"rewards of shard {rank}: item", item, f"one of 0 … {total - 1}, scored once")
            rows[item] = row
    missing = [item for item in range(total) if item not in rows]
    if missing:
        raise RewardError("rewards: items without a score", missing[:8], f"none of {total}")
    return torch.tensor([rows[item] for item in range(total)], dtype=torch.float64)


def gather_scores(shard: Shard, total: int) -> Float64[Tensor, "items models"]:
    """Exchange the shards of all processes of ``torch.distributed`` and merge them; every process gets all scores.

    A process whose scoring failed sends its error instead, so that all of them fail together and none waits for ever.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return merge_shards([shard], total)
    shards: list[Shard] = [shard] * distributed.get_world_size()
    distributed.all_gather_object(shards, shard)
    return merge_shards(shards, total)
