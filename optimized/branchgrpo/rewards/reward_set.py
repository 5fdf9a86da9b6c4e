"""Several rewards with their weights, as one validated value (REW-4)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.protocols import RewardModel


@dataclass(frozen=True)
class WeightedReward:
    """A reward model and its weight in the sum of advantages (or of rewards: ``Normalization.order``)."""

    model: RewardModel
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise OptionError(f"weight of {self.model.name}", self.weight, "a finite real")


@dataclass(frozen=True)
class RewardSet:
    """At least one reward model, names distinct, not all weights zero (REW-4).

    A weight of zero is legal: the model is scored and logged, and does not train.
    """

    members: tuple[WeightedReward, ...]

    def __post_init__(self) -> None:
        names = [member.model.name for member in self.members]
        if not names:
            raise OptionError("rewards", (), "at least one reward model")
        for name in names:
            if names.count(name) > 1:
                raise OptionError("rewards", name, "named once")
        if all(member.weight == 0.0 for member in self.members):
            raise OptionError("weights", self.weights, "not all zero")

    @classmethod
    def of(cls, *models: RewardModel, weights: Sequence[float] | None = None) -> "RewardSet":
        """Models in order, each of weight 1 unless weights are given.

        Raises:
            OptionError: another number of weights than of models.
        """
        values = [1.0] * len(models) if weights is None else list(weights)
        if len(values) != len(models):
            raise OptionError("weights", tuple(values), f"{len(models)} reals, one a reward model")
        return cls(tuple(WeightedReward(m, w) for m, w in zip(models, values, strict=True)))

    @property
    def models(self) -> tuple[RewardModel, ...]:
        """The models, in order."""
        return tuple(member.model for member in self.members)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights, in order: what normalization takes."""
        return tuple(member.weight for member in self.members)
