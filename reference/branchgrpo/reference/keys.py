"""The key contract: which random stream belongs to which draw (spec: noise)."""

import numpy as np

from branchgrpo.reference.errors import OptionError, is_integer
from branchgrpo.reference.protocols import NoiseRole

ROLE_CODES = {NoiseRole.ROOT: 0, NoiseRole.SHARED: 1, NoiseRole.PRIVATE: 2, NoiseRole.SUBSET: 3, NoiseRole.WINDOW: 4}


def keyed_generator(
    seed: int, iteration: int, role: NoiseRole, prompt: int = 0, root: int = 0, depth: int = 0, node: int = 0
) -> np.random.Generator:
    """A generator whose stream is a function of the key alone.

    Clause: NOISE-4.  Philox-4×64 takes the key (seed, iteration) and starts its 256-bit counter at
    (0, prompt, role·2⁵⁶ + depth·2³² + root, node): distinct keys never share a block of the counter.

    Raises:
        OptionError: a part that is negative or does not fit its field.
    """
    parts = {"seed": (seed, 64), "iteration": (iteration, 64), "prompt": (prompt, 63)}
    parts |= {"root": (root, 32), "depth": (depth, 24), "node": (node, 63)}
    for name, (value, bits) in parts.items():
        if not is_integer(value) or not 0 <= value < 2**bits:
            raise OptionError(f"noise key {name}", value, f"an integer in 0..2^{bits} − 1")
    counter = np.array([0, prompt, ROLE_CODES[role] << 56 | depth << 32 | root, node], dtype=np.uint64)
    key = np.array([seed, iteration], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
