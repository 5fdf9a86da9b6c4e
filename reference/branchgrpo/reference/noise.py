"""Keyed standard normal numbers, and branch noise (spec: noise)."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.keys import keyed_generator
from branchgrpo.reference.protocols import NoiseKeys


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

    Clause: NOISE-2.  Source: BranchGRPO Eq. 5, in a form that has a value at every s in [0, ∞] (DIV-P2).
    """
    if math.isinf(spread):
        return 0.0, 1.0
    norm = math.hypot(1.0, spread)
    return 1.0 / norm, spread / norm


def branch_noise(
    shared: Float[Tensor, "*latent"], private: Float[Tensor, "*latent"], spread: float
) -> Float[Tensor, "*latent"]:
    """ξ_b = a·ξ₀ + c·η_b: exactly N(0, I), with Cov(ξ_b, ξ_b′) = I/(1 + s²) between siblings.

    Clause: NOISE-1, DIV-B1.  Source: BranchGRPO Eq. 5, Lemma 1.

    Args:
        shared: ξ₀, one a splitting parent.
        private: η_b, one a child.
        spread: s in [0, ∞].
    """
    a, c = branch_coefficients(spread)
    return a * shared + c * private
