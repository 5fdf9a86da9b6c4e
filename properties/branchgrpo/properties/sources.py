"""Noise sources of the checks: chosen numbers, permuted keys, and counting of what is drawn."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from branchgrpo.properties.linear import Key
from branchgrpo.reference.protocols import NoiseKeys, NoiseRole, NoiseSource


class ChosenNoise:
    """Prompt p gets row p of a table: one column a draw, the same number in every element.

    Args:
        draws: keys in column order.
        points: the table.
        others: value of draws that are not in the table; None makes them an error, for nothing else may be drawn.
    """

    def __init__(
        self, draws: Sequence[Key], points: Float64[np.ndarray, "prompts draws"], others: float | None = None
    ) -> None:
        self.columns = {key: i for i, key in enumerate(draws)}
        self.points = np.concatenate([points, np.full((len(points), 1), np.nan if others is None else others)], axis=1)
        self.others = others

    def column(self, key: Key) -> int:
        """Column of a key; the last one for those that are not in the table."""
        found = self.columns.get(key, -1)
        if found < 0 and self.others is None:
            raise KeyError(f"drawn, but no draw of this plan: {key}")
        return found

    def draw(
        self, keys: NoiseKeys, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Float[Tensor, "draws *latent"]:
        """The chosen numbers."""
        pairs = zip(keys.roots.tolist(), keys.nodes.tolist(), strict=True)
        at = [self.column((keys.role, root, keys.depth, node)) for root, node in pairs]
        values = torch.from_numpy(self.points[keys.prompts.cpu().numpy(), at])
        expanded = values.reshape(-1, *[1] * len(shape)).expand(-1, *shape)
        return expanded.to(device=device, dtype=dtype).contiguous()


Rename = Callable[[int, Int64[Tensor, "draws"]], Int64[Tensor, "draws"]]
"""(depth, nodes) → the nodes whose draws they get."""


class RenamedNoise:
    """Another source with its node indices renamed: what a permutation of siblings does to the draws."""

    def __init__(self, source: NoiseSource, rename: Rename) -> None:
        self.source = source
        self.rename = rename

    def draw(
        self, keys: NoiseKeys, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Float[Tensor, "draws *latent"]:
        """The draws of the renamed nodes."""
        nodes = self.rename(keys.depth, keys.nodes)
        renamed = NoiseKeys(keys.iteration, keys.role, keys.depth, keys.prompts, keys.roots, nodes)
        return self.source.draw(renamed, shape, dtype, device)


class MaskedNoise:
    """Another source with some roles at some depths replaced by zeros."""

    def __init__(self, source: NoiseSource, hidden: Callable[[NoiseRole, int], bool]) -> None:
        self.source = source
        self.hidden = hidden

    def draw(
        self, keys: NoiseKeys, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Float[Tensor, "draws *latent"]:
        """Zeros, or the other source's draws."""
        drawn = self.source.draw(keys, shape, dtype, device)
        return torch.zeros_like(drawn) if self.hidden(keys.role, keys.depth) else drawn


class ConstantRoots:
    """Another source whose root states are one known number in every element."""

    def __init__(self, source: NoiseSource, value: float) -> None:
        self.source = source
        self.value = value

    def draw(
        self, keys: NoiseKeys, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Float[Tensor, "draws *latent"]:
        """The known root, or the other source's draws."""
        drawn = self.source.draw(keys, shape, dtype, device)
        return torch.full_like(drawn, self.value) if keys.role is NoiseRole.ROOT else drawn
