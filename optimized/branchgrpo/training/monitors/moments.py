"""Count, mean, spread and range of numbers that are spread over parts and processes, merged without loss."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Moments of a set of numbers; two sets' moments give those of their union, to rounding.

    Attributes:
        count: of numbers.
        mean: their mean; 0 for none.
        squares: sum of squared deviations from the mean.
        low, high: smallest and largest; ∞ and −∞ for none.  A NaN among the numbers makes mean and squares NaN.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, numbers: Tensor | Iterable[float]) -> "Moments":
        """Moments of a tensor's elements, or of plain numbers, in float64."""
        given = numbers if isinstance(numbers, Tensor) else torch.tensor(list(numbers), dtype=torch.float64)
        values = given.detach().double().flatten()
        if len(values) == 0:
            return cls()
        mean = values.mean()
        found = torch.stack([mean, (values - mean).square().sum(), values.min(), values.max()]).tolist()
        return cls(len(values), *found)

    @classmethod
    def rows(cls, table: Tensor) -> list["Moments"]:
        """Moments of every row of a table with at least one column, in one go."""
        values = table.detach().double()
        mean = values.mean(dim=1, keepdim=True)
        columns = [mean.squeeze(1), (values - mean).square().sum(dim=1), values.amin(dim=1), values.amax(dim=1)]
        return [cls(values.shape[1], *row) for row in torch.stack(columns, dim=1).tolist()]

    def __add__(self, other: "Moments") -> "Moments":
        """Moments of the union (Chan's parallel update)."""
        if self.count == 0 or other.count == 0:
            return other if self.count == 0 else self
        count, gap = self.count + other.count, other.mean - self.mean
        mean = self.mean + gap * other.count / count
        squares = self.squares + other.squares + gap * gap * self.count * other.count / count
        return Moments(count, mean, squares, min(self.low, other.low), max(self.high, other.high))

    @property
    def std(self) -> float:
        """Population standard deviation; NaN for no numbers."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan


Tally = dict[str, Moments]
"""Moments by name: what one part of one process has seen."""


def merge(tallies: Iterable[Tally]) -> Tally:
    """The tally of everything that any of them has seen; names in order of first appearance."""
    total: Tally = {}
    for tally in tallies:
        for name, moments in tally.items():
            total[name] = total.get(name, Moments()) + moments
    return total
