"""Keyed standard normal numbers, and branch noise (spec: noise)."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.errors import OptionError, is_integer
from branchgrpo.reference.protocols import NoiseKeys, NoiseRole

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


class KeyedNoise:
    """A ``NoiseSource`` with the same numbers on every device and in any batching (NOISE-4).

    Draws are made in float64 on the CPU and then cast, so a lower precision rounds the same numbers.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def draw(
        self, keys: NoiseKeys, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Float[Tensor, "draws *latent"]:
        """One standard normal tensor a key."""
        rows = zip(keys.prompts.tolist(), keys.roots.tolist(), keys.nodes.tolist(), strict=True)
        draws = [
            keyed_generator(self.seed, keys.iteration, keys.role, p, r, keys.depth, n).standard_normal(tuple(shape))
            for p, r, n in rows
        ]
        return torch.from_numpy(np.stack(draws)).to(device=device, dtype=dtype)


def branch_coefficients(spread: float) -> tuple[float, float]:
    """a = 1/√(1 + s²) and c = s/√(1 + s²), with (0, 1) at s = ∞.

    Clause: NOISE-2.  Source: BranchGRPO Eq. 5, in a form that has a value at every s in [0, ∞].
    """
    if math.isinf(spread):
        return 0.0, 1.0
    norm = math.hypot(1.0, spread)
    return 1.0 / norm, spread / norm


def branch_noise(
    shared: Float[Tensor, "*latent"], private: Float[Tensor, "*latent"], spread: float
) -> Float[Tensor, "*latent"]:
    """ξ_b = a·ξ₀ + c·η_b: exactly N(0, I), with Cov(ξ_b, ξ_b′) = I/(1 + s²) between siblings.

    Clause: NOISE-1.  Source: BranchGRPO Eq. 5, Lemma 1.

    Args:
        shared: ξ₀, one a splitting parent.
        private: η_b, one a child.
        spread: s in [0, ∞].
    """
    a, c = branch_coefficients(spread)
    return a * shared + c * private
