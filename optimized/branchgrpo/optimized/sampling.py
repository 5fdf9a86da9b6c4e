"""What a rollout needs beside the plan, the model and the prompts (spec: rollout)."""

from dataclasses import dataclass

import torch

from branchgrpo.reference.errors import OptionError, check_latent_shape, is_integer
from branchgrpo.reference.protocols import NoiseSource
from branchgrpo.reference.types import Reduction

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sampling:
    """Everything a rollout needs beside the plan, the model and the prompts (ROLL-2).

    Attributes:
        noise: where standard normal numbers come from.
        latent_shape: shape of one state.
        dtype: dtype of the arithmetic.
        storage_dtype: dtype in which states are kept; the realised-action rule holds for each (ROLL-5, LOGP-3).
        reduction: reduction of the log-probabilities.
        iteration: training iteration; part of every noise key.
        device: where the arithmetic is done.
        chunk: capacity: most items a denoiser call; None puts all that is ready into one call.
        keep_means: keep transition means too (traces need them, training does not).
        offload: keep states in the CPU's memory (pinned where the arithmetic is on a GPU).
        compile: compile large steps (``torch.compile``; eager where that fails).
        pad: fill every call up to ``chunk`` items, so that all calls have one shape and an item's velocity cannot
            depend on how many others share its call.
    """

    noise: NoiseSource
    latent_shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    storage_dtype: torch.dtype = torch.float64
    reduction: Reduction = Reduction.MEAN
    iteration: int = 0
    device: torch.device = CPU
    chunk: int | None = None
    keep_means: bool = False
    offload: bool = False
    compile: bool = False
    pad: bool = False

    def __post_init__(self) -> None:
        check_latent_shape(self.latent_shape)
        if self.chunk is not None and (not is_integer(self.chunk) or self.chunk < 1):
            raise OptionError("sampling.chunk", self.chunk, "None or an integer ≥ 1")
        if self.pad and self.chunk is None:
            raise OptionError("sampling.pad", self.pad, "False without a chunk to fill")
        for name in ("dtype", "storage_dtype"):
            if not getattr(self, name).is_floating_point:
                raise OptionError(f"sampling.{name}", getattr(self, name), "a floating dtype")
