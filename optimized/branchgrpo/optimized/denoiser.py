"""Checked calls of a velocity model for batches of items of any level, and the verdict on what it returned."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from branchgrpo.optimized.ranks import Ranks
from branchgrpo.reference.errors import ModelError
from branchgrpo.reference.protocols import Condition, Prompt, VelocityModel


@dataclass(frozen=True)
class Place:
    """Where some of a call's items live: flat indices into a level ``[prompts, R·n_d]``, for messages."""

    step: int
    width: int
    roots: int
    items: range | Int64[Tensor, "items"]


@dataclass(frozen=True, eq=False)
class FiniteLog:
    """Which items had a finite velocity, kept on the device: no synchronisation before ``verify``.  Clause: ERR-3."""

    entries: list[tuple[Place, Bool[Tensor, "items"]]] = field(default_factory=list)

    def record(self, places: list[Place], v: Float[Tensor, "items *latent"]) -> None:
        """Note for every item whether all its elements are finite."""
        finite = torch.isfinite(v).flatten(1).all(dim=1)
        sizes = [len(place.items) for place in places]
        self.entries.extend(zip(places, torch.split(finite, sizes), strict=True))

    def record_flags(self, place: Place, finite: Bool[Tensor, "items"]) -> None:
        """Note flags that were found another way."""
        self.entries.append((place, finite))

    def fault(self, prompts: tuple[Prompt, ...]) -> ModelError | None:
        """The error of the first item, by step and then by place, whose velocity was not finite; None if all were."""
        if not self.entries or bool(torch.stack([finite.all() for _, finite in self.entries]).all()):
            return None
        bad = [
            (place.step, int(place.items[item]), place)
            for place, finite in self.entries
            for item in (~finite).nonzero().flatten().tolist()
        ]
        step, flat, place = min(bad, key=lambda entry: entry[:2])
        prompt = prompts[flat // (place.roots * place.width)].id
        where = f"step {step}, node {flat % place.width} of prompt {prompt}"
        return ModelError(f"velocity at {where}", "NaN or ±inf", "finite")

    def verify(self, prompts: tuple[Prompt, ...], ranks: Ranks | None = None) -> None:
        """Raise the ``fault``; with ranks, the lowest rank's on every rank.

        Raises:
            ModelError: names step, node and prompt.
        """
        error = self.fault(prompts)
        if ranks is not None:
            ranks.agree(error)
        elif error is not None:
            raise error


def velocity(
    model: VelocityModel,
    x: Float[Tensor, "items *latent"],
    sigma: Float[Tensor, "items"],
    condition: Condition,
    step: int,
) -> Float[Tensor, "items *latent"]:
    """v_θ for a batch of items, each with its own σ and prompt; shape and dtype checked, values not yet.

    Clause: ROLL-3, ERR-3.

    Args:
        condition: one item an item.
        step: of the first item, for the error.

    Raises:
        ModelError: another shape, or a dtype that is not floating.
    """
    v = model(x, sigma, condition)
    if v.shape != x.shape:
        raise ModelError(f"velocity at step {step}: shape", tuple(v.shape), f"{tuple(x.shape)}")
    if not v.dtype.is_floating_point:
        raise ModelError(f"velocity at step {step}: dtype", v.dtype, "a floating dtype")
    return v.to(x.dtype)
