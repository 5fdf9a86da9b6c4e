"""Which prompts an iteration trains on: a function of the seed and the iteration, so a resume needs no state."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from branchgrpo.reference.errors import InputError, OptionError, is_integer
from branchgrpo.reference.protocols import Prompt

DOMAIN = 0x73616D706C6572
"""Tells the sampler's random numbers from any other use of the run's seed."""


@dataclass(frozen=True)
class Sampler:
    """Batches of prompts, epoch after epoch.

    An epoch is one order of all prompts, cut into batches; what is left at its end is dropped, so no batch holds a
    prompt twice, and another order leaves out others. Every rank makes the same batch and takes its own part of it.

    Attributes:
        prompts: all of them, with ids that differ.
        per_iteration: prompts of a batch, over all ranks and accumulation parts.
        seed: of the orders.
        shuffle: a new order an epoch; else the order of ``prompts``, which always drops the same ones.
    """

    prompts: tuple[Prompt, ...]
    per_iteration: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", tuple(self.prompts))
        if len({prompt.id for prompt in self.prompts}) < len(self.prompts):
            raise InputError("prompts: ids", "repeated", "different, for they key the noise")
        if not is_integer(self.per_iteration) or self.per_iteration < 1:
            raise OptionError("data.prompts_per_iteration", self.per_iteration, "an integer ≥ 1")
        if self.per_iteration > len(self.prompts):
            raise OptionError("data.prompts_per_iteration", self.per_iteration, f"at most {len(self.prompts)} prompts")
        if not is_integer(self.seed) or self.seed < 0:
            raise OptionError("run.seed", self.seed, "an integer ≥ 0")

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return len(self.prompts) // self.per_iteration

    def order(self, epoch: int) -> Sequence[int]:
        """Positions of all prompts in the order of an epoch."""
        if not self.shuffle:
            return range(len(self.prompts))
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([DOMAIN, self.seed, epoch])))
        return [int(i) for i in generator.permutation(len(self.prompts))]

    def batch(self, iteration: int) -> tuple[Prompt, ...]:
        """The prompts of an iteration, the same on every rank.

        Raises:
            InputError: a negative iteration.
        """
        if not is_integer(iteration) or iteration < 0:
            raise InputError("iteration", iteration, "an integer ≥ 0")
        epoch, turn = divmod(iteration, self.batches)
        chosen = self.order(epoch)[turn * self.per_iteration : (turn + 1) * self.per_iteration]
        return tuple(self.prompts[i] for i in chosen)

    def part(self, batch: Sequence[Prompt], rank: int, size: int, part: int = 0, parts: int = 1) -> tuple[Prompt, ...]:
        """The slice of one rank and one accumulation part: first cut by ranks, then by parts.

        Args:
            batch: what ``batch`` gave.
            rank, size: of the process group.
            part, parts: of the accumulation.

        Raises:
            OptionError: a batch that ranks and parts do not divide.
            InputError: a rank or part out of range.
        """
        if not 0 <= rank < size:
            raise InputError("rank", rank, f"in 0..{size - 1}")
        if not 0 <= part < parts:
            raise InputError("part", part, f"in 0..{parts - 1}")
        if len(batch) % (size * parts):
            legal = f"a multiple of {size} processes × update.accumulation = {parts}"
            raise OptionError("data.prompts_per_iteration", len(batch), legal)
        width = len(batch) // (size * parts)
        start = (rank * parts + part) * width
        return tuple(batch[start : start + width])
