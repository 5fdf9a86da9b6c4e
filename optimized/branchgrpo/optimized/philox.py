"""Counter-based normal numbers made on the device: streams by Philox-4×32-10, numbers by SplitMix64 (spec: noise)."""

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
    """Philox-4×32-10 of counters and keys held as 32-bit words in int64 tensors of one shape.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Both halves of a round are done at
    once: products of the even words, which wrap modulo 2⁶⁴; their low words are the odd words of the next round, and
    what lies above them, as what the arithmetic shift draws in, is masked off with the sum.
    """
    even, odd = torch.stack([c0, c2]), torch.stack([c3, c1])
    lanes = (2, *(1,) * c0.ndim)
    constants = torch.tensor([MULTIPLIERS, WEYL[::-1]]).to(even.device, non_blocking=True)
    multiplier, weyl = constants[0].reshape(lanes), constants[1].reshape(lanes)
    rounds = torch.arange(ROUNDS, device=even.device).reshape(-1, *(1,) * even.ndim)
    for key in (torch.stack([k1, k0]) + rounds * weyl).unbind(0):
        product = even * multiplier
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(key).bitwise_and_(WORD).flip(0)
        odd = product
    odd = odd & WORD
    return even[0], odd[1], even[1], odd[0]


@no_type_check
def draw_streams(prompts, roots, nodes, key):  # noqa: ANN001, ANN201
    """Two 64-bit words for every draw: Philox of the counter (prompt, node) under ``key``, root folded in.

    Args:
        prompts, roots, nodes: int64 ``[draws]``.
        key: two 32-bit words a draw, int64 ``[draws, 2]``.
    """
    words = (prompts & WORD, prompts >> 32, nodes & WORD, nodes >> 32)
    w0, w1, w2, w3 = philox(*words, key[:, 0] ^ roots, key[:, 1])
    return (w0 << 32) | w1, (w2 << 32) | w3


def signed(word: int) -> int:
    """The 64-bit word as PyTorch's int64 holds it."""
    return word - (1 << 64) if word >> 63 else word


GAMMA, MIX = signed(0x9E3779B97F4A7C15), (signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB))
"""SplitMix64's increment and the multipliers of its finaliser."""


@no_type_check
def stream_words(start, twist, counter):  # noqa: ANN001, ANN201
    """Word ``counter`` of a stream: SplitMix64's finaliser of start + counter·γ, ``twist`` mixed in half-way.

    Source: Steele et al., "Fast splittable pseudorandom number generators" (OOPSLA 2014). For one stream it is a
    permutation of the counters. Products and sums wrap modulo 2⁶⁴; a mask makes the arithmetic shift a logical one.

    Args:
        start, twist: the stream's two words, int64, broadcast against ``counter``.
        counter: int64.
    """
    z = start + counter * GAMMA
    high = torch.empty_like(z)
    for shift, multiplier in ((30, MIX[0]), (27, MIX[1]), (31, None)):
        torch.bitwise_right_shift(z, shift, out=high)
        z.bitwise_xor_(high.bitwise_and_((1 << (64 - shift)) - 1))
        if multiplier is not None:
            z.mul_(multiplier)
        if shift == 30:
            z.bitwise_xor_(twist)
    return z


@no_type_check
def fill_normal(rows, start, twist) -> None:  # noqa: ANN001
    """Fill ``rows`` with the streams' normals: Box–Muller on pairs of 32-bit words w.

    The radius is √(−2 ln((|w| + ½)·2⁻³¹)), at most √(64 ln 2) = 6.66, the angle 2π·w·2⁻³², w signed.

    Args:
        rows: float32 ``[draws, 2, n]``, n even.
        start, twist: of every draw's stream, int64 ``[draws]``.
    """
    quads = rows.shape[2] // 2
    counter = torch.arange(2 * quads, device=rows.device).reshape(2, 1, quads)
    words = stream_words(start.unsqueeze(1), twist.unsqueeze(1), counter).view(torch.int32).to(torch.float32)
    radius = words[0].abs_().add_(0.5).mul_(2.0**-31).log_().mul_(-2.0).sqrt_()
    angle = words[1].mul_(2.0 * math.pi * 2.0**-32)
    torch.mul(radius, torch.cos(angle), out=rows[:, 0])
    torch.mul(radius, angle.sin_(), out=rows[:, 1])


BLOCK = 2**15
"""Numbers made at once on a CPU: what its cache holds of the words on the way to them."""


@no_type_check
def normal_rows(start, twist, size: int):  # noqa: ANN001, ANN201
    """``size`` float32 normals of every stream, ``[draws, size]``; on a CPU by parts, the same numbers."""
    half = 2 * ((size + 3) // 4)
    rows = torch.empty(len(start), 2, half, dtype=torch.float32, device=start.device)
    step = max(BLOCK // (2 * half), 1) if rows.device.type == "cpu" else max(len(start), 1)
    for first in range(0, len(start), step):
        at = slice(first, first + step)
        fill_normal(rows[at], start[at], twist[at])
    return rows.flatten(1)[:, :size]


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
    64-bit key; root, prompt and node lead from there by Philox to the draw's own stream, and a few operations a number
    along it. Numbers have the resolution of float32 in every dtype, and are the same on one kind of device whatever
    the batch; the words they are made of are the same on all devices.

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
        words = torch.tensor([(base & WORD, base >> 32) for base in bases])
        columns = (
            torch.cat([k.prompts for k in keys]),
            torch.cat([k.roots for k in keys]),
            torch.cat([k.nodes for k in keys]),
            words.repeat_interleave(torch.tensor(counts), dim=0, output_size=sum(counts)),
        )
        streams = draw_streams(*(column.to(device, non_blocking=True) for column in columns))
        rows: Tensor = normal_rows(*streams, size)
        return torch.split(rows.reshape(-1, *shape).to(dtype), counts)
