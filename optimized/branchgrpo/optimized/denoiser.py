"""Checked calls of a velocity model for batches of items of any level, and the verdict on what it returned."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from branchgrpo.optimized.ranks import Ranks
from branchgrpo.reference.errors import ModelError
from branchgrpo.reference.protocols import Condition, Prompt, VelocityModel


@dataclass(frozen=True)
class Place:
    """Where some of a call's items live: flat indices into a level ``[prompts, R·n_d]``, for messages.

    Attributes:
        step, width, roots, items: of the items, which are parents.
        stored: None for a judgement of their velocities; of their children, the dtype in which these are stored.
    """

    step: int
    width: int
    roots: int
    items: range | Int64[Tensor, "items"]
    stored: torch.dtype | None = None

    def error(self, flat: int, prompts: tuple[Prompt, ...], arithmetic: torch.dtype) -> ModelError:
        """What is wrong with item ``flat``.  Clause: ERR-3."""
        prompt = prompts[flat // (self.roots * self.width)].id
        where = f"step {self.step}, node {flat % self.width} of prompt {prompt}"
        if self.stored is not None:
            return ModelError(f"children at {where}", "±inf", f"{reach(self.stored)}, in which states are stored")
        legal = f"finite and {reach(arithmetic)}, the arithmetic's" if arithmetic is torch.float16 else "finite"
        return ModelError(f"velocity at {where}", "NaN or ±inf", legal)


def reach(dtype: torch.dtype) -> str:
    """The range of a dtype, for messages."""
    return f"within ±{torch.finfo(dtype).max:g}, the range of {dtype}"


@dataclass(frozen=True, eq=False)
class FiniteLog:
    """Which items had a finite velocity, kept on the device: no synchronisation before ``verify``.  Clause: ERR-3.

    Attributes:
        arithmetic: dtype in which velocities are used; one of small range is named in the message.
        entries: for every item so far a number that is finite if and only if the item was.
    """

    arithmetic: torch.dtype = torch.float32
    entries: list[tuple[list[Place], Float[Tensor, "items"]]] = field(default_factory=list)

    def record(self, places: list[Place], v: Float[Tensor, "items *latent"]) -> None:
        """Note for every item whether all its elements are finite: its largest magnitude is."""
        self.entries.append((places, torch.linalg.vector_norm(v.flatten(1), math.inf, dim=1)))

    def record_flags(self, place: Place, finite: Bool[Tensor, "items"]) -> None:
        """Note flags that were found another way."""
        self.entries.append(([place], torch.zeros_like(finite, dtype=torch.float32).masked_fill_(~finite, math.nan)))

    def fault(self, prompts: tuple[Prompt, ...]) -> ModelError | None:
        """The error of the first item, by step and then by place, that was not finite; None if all were."""
        if not self.entries or bool(torch.isfinite(torch.cat([peaks for _, peaks in self.entries])).all()):
            return None
        bad = [
            (place.step, int(place.items[item]), place.stored is not None, place)
            for places, all_peaks in self.entries
            for place, peaks in zip(places, torch.split(all_peaks, [len(p.items) for p in places]), strict=True)
            for item in (~torch.isfinite(peaks)).nonzero().flatten().tolist()
        ]
        _, flat, _, place = min(bad, key=lambda entry: entry[:3])
        return place.error(flat, prompts, self.arithmetic)

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
