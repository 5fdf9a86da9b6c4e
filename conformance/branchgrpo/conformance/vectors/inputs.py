"""Input numbers: small multiples of a power of two, so that every dtype and every JSON holds them exactly."""

import zlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

SPAN = 96
"""Largest numerator: below 2⁸, so that bf16 holds it as well."""


def numbers(name: str, shape: Sequence[int], unit: float = 1 / 32) -> Float64[np.ndarray, "..."]:
    """Numbers in ±96 units, from raw Philox words keyed by a name: the same on every machine and in every version."""
    count = int(np.prod(shape, dtype=np.int64))
    words = np.random.Philox(key=np.array([zlib.crc32(name.encode()), 0], dtype=np.uint64)).random_raw(count)
    return ((np.asarray(words) >> 33) % (2 * SPAN + 1)).astype(np.float64).reshape(tuple(shape)) * unit - SPAN * unit


def signs(name: str, shape: Sequence[int], share: float = 0.5) -> np.ndarray:
    """Booleans, true with a given share."""
    return (numbers(name, shape, 1.0) + SPAN) < share * (2 * SPAN + 1)
