"""Noise keys of a level's nodes, keyed numbers for many keys, and branch noise (spec: noise)."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from branchgrpo.reference.keys import keyed_generator
from branchgrpo.reference.protocols import NoiseKeys, NoiseRole


class KeyedNoise:
    """The keyed ``NoiseSource``: NumPy's Philox in float64, then cast; the same numbers on every device.

    Clause: NOISE-4.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def draw(
        self, keys: NoiseKeys, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Float[Tensor, "draws *latent"]:
        """One standard normal tensor a key."""
        rows = np.empty((len(keys.nodes), *shape))
        parts = zip(rows, keys.prompts.tolist(), keys.roots.tolist(), keys.nodes.tolist(), strict=True)
        for row, prompt, root, node in parts:
            generator = keyed_generator(self.seed, keys.iteration, keys.role, prompt, root, keys.depth, node)
            generator.standard_normal(out=row)
        return torch.from_numpy(rows).to(device=device, dtype=dtype)


def level_keys(
    iteration: int,
    role: NoiseRole,
    depth: int,
    prompt_ids: Int64[Tensor, "prompts"],
    roots: int,
    width: int,
    first: int,
    last: int,
) -> NoiseKeys:
    """Keys of the flat range first … last − 1 of a level ``[prompts, R·n_d]``.

    Clause: NOISE-4.

    Args:
        iteration, role, depth: of the keyed nodes.
        prompt_ids: stable id of every prompt, in batch order.
        roots: R.
        width: n_d, nodes of one root's tree at the depth.
        first, last: the range.
    """
    at = torch.arange(first, last)
    tree = at // width
    return NoiseKeys(iteration, role, depth, prompt_ids[tree // roots], tree % roots, at % width)


def branch_coefficients(spread: float) -> tuple[float, float]:
    """(a, c) = (1, s) / √(1 + s²); (0, 1) at s = ∞.  Clause: NOISE-2."""
    if math.isinf(spread):
        return 0.0, 1.0
    norm = math.hypot(1.0, spread)
    return 1.0 / norm, spread / norm


def branch_noise(
    shared: Float[Tensor, "parents *latent"], private: Float[Tensor, "parents K *latent"], spread: float
) -> Float[Tensor, "parents K *latent"]:
    """ξ_b = a·ξ₀ + c·η_b for all children of all parents.

    Clause: NOISE-1.  Source: BranchGRPO Eq. 5, Lemma 1.
    """
    a, c = branch_coefficients(spread)
    return a * shared.unsqueeze(1) + c * private
