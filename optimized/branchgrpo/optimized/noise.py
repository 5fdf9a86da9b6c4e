"""Keyed numbers for many keys, the keys of a level's nodes, and branch noise (spec: noise)."""

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from branchgrpo.reference.errors import OptionError, is_integer
from branchgrpo.reference.keys import ROLE_CODES, keyed_generator
from branchgrpo.reference.protocols import NoiseKeys, NoiseRole


@runtime_checkable
class NoiseInBulk(Protocol):
    """A source that makes the draws of several key sets at once for less than one after the other.  Clause: NOISE-4."""

    def draw_all(
        self, keys: Sequence[NoiseKeys], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        """For each key set the same numbers as ``draw`` would give."""
        ...


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
        return self.draw_all([keys], shape, dtype, device)[0]

    def draw_all(
        self, keys: Sequence[NoiseKeys], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        """The draws of several key sets.

        One generator serves all keys of an iteration: its counter is set to the key's place (0, prompt,
        role·2⁵⁶ + depth·2³² + root, node), which ``keyed_generator`` defines and a new generator would start from.
        """
        counts = [len(k.nodes) for k in keys]
        rows, first = np.empty((sum(counts), *shape)), 0
        sources = {iteration: fresh_generator(self.seed, iteration) for iteration in {k.iteration for k in keys}}
        for one, count in zip(keys, counts, strict=True):
            fill_rows(rows[first : first + count], one, *sources[one.iteration])
            first += count
        return torch.split(torch.from_numpy(rows).to(device=device, dtype=dtype), counts)


def fresh_generator(seed: int, iteration: int) -> tuple[np.random.Generator, dict[str, Any]]:
    """The generator of an iteration and its state before the first number, in plain integers.  Clause: NOISE-4."""
    generator = keyed_generator(seed, iteration, NoiseRole.ROOT)
    fresh: Any = generator.bit_generator.state
    key, buffer = (tuple(words.tolist()) for words in (fresh["state"]["key"], fresh["buffer"]))
    return generator, {**fresh, "state": {"key": key}, "buffer": buffer}


def fill_rows(rows: Any, keys: NoiseKeys, generator: np.random.Generator, state: dict[str, Any]) -> None:
    """Draw one float64 row a key, whose counter is put into the generator's state.  Clause: NOISE-4."""
    parts = [keys.prompts.tolist(), keys.roots.tolist(), keys.nodes.tolist()]
    check_keys(keys.depth, *parts)
    source: Any = generator.bit_generator
    words, base = state["state"], ROLE_CODES[keys.role] << 56 | keys.depth << 32
    for row, prompt, root, node in zip(rows, *parts, strict=True):
        words["counter"] = (0, prompt, base | root, node)
        source.state = state
        generator.standard_normal(out=row)


def check_keys(depth: int, prompts: list[int], roots: list[int], nodes: list[int]) -> None:
    """Depth in 0..2²⁴ − 1, prompts and nodes in 0..2⁶³ − 1, roots in 0..2³² − 1.  Clause: NOISE-4.

    Raises:
        OptionError: names the part at fault.
    """
    if not is_integer(depth):
        raise OptionError("noise key depth", depth, "an integer in 0..2^24 − 1")
    for name, values, bits in (
        ("depth", [depth], 24),
        ("prompt", prompts, 63),
        ("root", roots, 32),
        ("node", nodes, 63),
    ):
        for value in (min(values), max(values)):
            if not 0 <= value < 2**bits:
                raise OptionError(f"noise key {name}", value, f"an integer in 0..2^{bits} − 1")


class Places:
    """Where the nodes of levels ``[prompts, R·n_d]`` are: prompt, root and node of every flat index, made once a width.

    Args:
        prompt_ids: stable id of every prompt, in batch order.
        roots: R.
        device: of the prompts' rows; keys stay on the CPU.
    """

    def __init__(self, prompt_ids: Int64[Tensor, "prompts"], roots: int, device: torch.device) -> None:
        self.prompt_ids, self.roots, self.device = prompt_ids, roots, device
        self.parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.rows: dict[int, Tensor] = {}

    def keys(self, iteration: int, role: NoiseRole, depth: int, width: int, first: int, last: int) -> NoiseKeys:
        """Keys of the flat range first … last − 1 of a level with n_d = ``width``.  Clause: NOISE-4."""
        if width not in self.parts:
            at = torch.arange(len(self.prompt_ids) * self.roots * width)
            tree = at // width
            self.parts[width] = (self.prompt_ids[tree // self.roots], tree % self.roots, at % width)
        prompts, roots, nodes = self.parts[width]
        if last - first < len(nodes):
            prompts, roots, nodes = prompts[first:last], roots[first:last], nodes[first:last]
        return NoiseKeys(iteration, role, depth, prompts, roots, nodes)

    def prompt_rows(self, width: int, first: int, last: int) -> Int64[Tensor, "items"]:
        """For every node of the range the row of its prompt."""
        if width not in self.rows:
            whole = torch.arange(len(self.prompt_ids), device=self.device)
            self.rows[width] = whole.repeat_interleave(self.roots * width)
        return self.rows[width][first:last]


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
