"""Counter-based normal numbers made on the device: Philox-4×32-10 and Box–Muller (spec: noise)."""

import math
from collections.abc import Sequence
from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.errors import OptionError, is_integer
from branchgrpo.reference.keys import ROLE_CODES
from branchgrpo.reference.protocols import NoiseKeys

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
HOST = (1 << 64) - 1


@no_type_check
def philox(c0, c1, c2, c3, k0, k1):  # noqa: ANN001, ANN201
    """Philox-4×32-10 of counters and keys held as 32-bit words in int64 tensors, which broadcast.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Products wrap modulo 2⁶⁴, and the
    mask after the arithmetic shift makes it a logical one.
    """
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & WORD) ^ c1 ^ k0, p1 & WORD
        c2, c3 = ((p0 >> 32) & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


plain_philox = getattr(philox, "__wrapped__", philox)
"""``philox`` without the shape checks of a test run, which a compiled graph cannot hold."""


@no_type_check
def normal_rows(prompts, roots, nodes, key, blocks: int):  # noqa: ANN001, ANN201
    """Four float32 normals for each of ``blocks`` counters of every draw's stream.

    The draw's stream is 128 bits: Philox of the counter (prompt, node) under ``key``, root folded in; two of its words
    are the key of the numbers, two the upper words of their counters. Box–Muller on (w + ½)·2⁻³²; the largest absolute
    value is √(66 ln 2) = 6.76.

    Args:
        prompts, roots, nodes: int64 ``[draws]``.
        key: two words a draw, int64 ``[draws, 2]``.
        blocks: counters a draw.
    """
    prompts, roots, nodes = prompts.unsqueeze(1), roots.unsqueeze(1), nodes.unsqueeze(1)
    words = (prompts & WORD, prompts >> 32, nodes & WORD, nodes >> 32)
    s0, s1, s2, s3 = plain_philox(*words, key[:, :1] ^ roots, key[:, 1:])
    counter = torch.arange(blocks, device=key.device)
    w0, w1, w2, w3 = plain_philox(counter, torch.zeros_like(counter), s2, s3, s0, s1)
    scale = 2.0**-32
    radius0 = torch.sqrt(-2.0 * torch.log((w0.to(torch.float32) + 0.5) * scale))
    radius1 = torch.sqrt(-2.0 * torch.log((w2.to(torch.float32) + 0.5) * scale))
    angle0 = w1.to(torch.float32) * (2.0 * math.pi * scale)
    angle1 = w3.to(torch.float32) * (2.0 * math.pi * scale)
    parts = (
        radius0 * torch.cos(angle0),
        radius0 * torch.sin(angle0),
        radius1 * torch.cos(angle1),
        radius1 * torch.sin(angle1),
    )
    return torch.cat(parts, dim=1)


def host_mix(*parts: int) -> int:
    """A 64-bit hash of integers: SplitMix64's finaliser, chained.  Source: Steele et al. (OOPSLA 2014)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & HOST
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & HOST
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & HOST
        state ^= state >> 31
    return state


class PhiloxNoise:
    """The fast ``NoiseSource``: every number is made on the device it is used on, as a function of its key alone.

    Clause: NOISE-4, NOISE-5.  Other numbers than the keyed source's. (seed, iteration, role, depth) are hashed to a
    64-bit key; root, prompt and node lead from there to the draw's own stream, see ``normal_rows``. Numbers have the
    resolution of float32 in every dtype, and are the same on one kind of device whatever the batch; their integer part
    is the same on all devices. Eager on purpose: compiled by torch 2.13 on a CPU,
    ``normal_rows`` returned other numbers.

    Args:
        seed: of the run, an integer in 0..2⁶⁴ − 1.

    Raises:
        OptionError: a seed that does not fit.
    """

    def __init__(self, seed: int) -> None:
        if not is_integer(seed) or not 0 <= seed <= HOST:
            raise OptionError("noise seed", seed, "an integer in 0..2^64 − 1")
        self.seed = seed

    def draw(
        self, keys: NoiseKeys, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Float[Tensor, "draws *latent"]:
        """One standard normal tensor a key."""
        return self.draw_all([keys], shape, dtype, device)[0]

    def draw_all(
        self, keys: Sequence[NoiseKeys], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        """The draws of several key sets by one run of the generator."""
        size, counts = math.prod(shape), [len(k.nodes) for k in keys]
        bases = [host_mix(self.seed, k.iteration, ROLE_CODES[k.role], k.depth) for k in keys]
        words = [(base & WORD, base >> 32) for base, count in zip(bases, counts, strict=True) for _ in range(count)]
        columns = (
            torch.cat([k.prompts for k in keys]),
            torch.cat([k.roots for k in keys]),
            torch.cat([k.nodes for k in keys]),
            torch.tensor(words),
        )
        placed = (column.to(device, non_blocking=True) for column in columns)
        rows: Tensor = normal_rows(*placed, (size + 3) // 4)
        return torch.split(rows[:, :size].reshape(-1, *shape).to(dtype), counts)
