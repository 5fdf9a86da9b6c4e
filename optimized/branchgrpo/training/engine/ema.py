"""An exponential moving average of the trained weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from branchgrpo.reference.errors import InputError
from branchgrpo.training.config.schema import EmaConfig
from branchgrpo.training.engine.optimizer import Named


class Ema:
    """m ← d·m + (1 − d)·w every so many optimiser steps, in float32 at least; starts at the first weights."""

    def __init__(self, weights: Named, config: EmaConfig) -> None:
        self.config = config
        self.mean = {name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
                     for name, p in weights.items()}  # fmt: skip

    @torch.no_grad()
    def update(self, weights: Named, step: int) -> None:
        """Take in the weights after optimiser step ``step`` (from 0)."""
        if (step + 1) % self.config.every == 0:
            for name, mean in self.mean.items():
                mean.lerp_(weights[name].detach().to(mean.dtype), 1.0 - self.config.decay)

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved average.

        Raises:
            InputError: names that are not the weights'.
        """
        if set(state) != set(self.mean):
            raise InputError("EMA state", sorted(set(state) ^ set(self.mean))[:3], "of the weights that are trained")
        for name, mean in self.mean.items():
            mean.copy_(state[name])


@contextmanager
def averaged_weights(weights: Named, ema: Ema | None) -> Iterator[None]:
    """Context in which the network has the averaged weights, if there is an average; bit for bit restored after."""
    if ema is None:
        yield
        return
    kept = {name: parameter.detach().clone() for name, parameter in weights.items()}
    try:
        with torch.no_grad():
            for name, parameter in weights.items():
                parameter.copy_(ema.mean[name])
        yield
    finally:
        with torch.no_grad():
            for name, parameter in weights.items():
                parameter.copy_(kept[name])
