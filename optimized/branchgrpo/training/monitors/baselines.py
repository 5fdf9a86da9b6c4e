"""Numbers that mean something only beside the first of their kind: diversity, and the gap between rewards."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

DIVERSITY = {"diversity/distance": "diversity", "evaluation/distance": "evaluation/diversity"}
"""A distance → its share of the first one."""


def relative(metrics: Mapping[str, float], baselines: dict[str, float]) -> dict[str, float]:
    """Distances as a share of the first that was seen, which is noted in ``baselines``.

    Args:
        metrics: of one iteration or evaluation.
        baselines: name of a number → its first value; kept with the run's state, so that a resumed run compares with
            the same.

    Returns:
        The shares alone; a distance that began at 0 has none.
    """
    found = {}
    for key, name in DIVERSITY.items():
        if key in metrics:
            first = baselines.setdefault(key, metrics[key])
            if first > 0.0 or not math.isfinite(first):
                found[name] = metrics[key] / first
    return found


FLOOR = 0.05
"""Least scale of a bounded reward, as a share of its range: an accuracy of 100 % has no spread to measure by."""


@dataclass(frozen=True)
class Scored:
    """One reward model in an evaluation.

    Attributes:
        name: of the model.
        weight: in training; 0 does not train.
        held_out: whether it is scored in evaluations only.
        range: of its values.
        mean, std: over all samples.
    """

    name: str
    weight: float
    held_out: bool
    range: tuple[float, float]
    mean: float
    std: float

    @property
    def scale(self) -> float:
        """The unit in which its rise is measured: its std, and no less than a share of a bounded range."""
        width = self.range[1] - self.range[0]
        return max(self.std, FLOOR * width) if math.isfinite(width) else self.std

    @property
    def room(self) -> float:
        """How far it could rise at most, in its unit: a reward that starts at its bound is not asked to rise."""
        return (self.range[1] - self.mean) / self.scale if self.scale > 0.0 else 0.0


def first_scores(scored: tuple[Scored, ...], baselines: dict[str, float]) -> dict[str, Scored]:
    """Every model as the first evaluation saw it, noted in ``baselines``."""
    found = {}
    for s in scored:
        mean = baselines.setdefault(f"evaluation/{s.name}/mean", s.mean)
        std = baselines.setdefault(f"evaluation/{s.name}/std", s.std)
        found[s.name] = Scored(s.name, s.weight, s.held_out, s.range, mean, std)
    return found


def reward_gap(scored: tuple[Scored, ...], baselines: dict[str, float]) -> float | None:
    """Rise of the trained rewards less that of the held-out ones, in standard deviations of the first evaluation.

    Formula: min(Σ |w|·z_m / Σ |w|, room) − mean z_h with z = (mean − first mean) / first std; a negative weight turns
    its z around, and room is the mean of what the held-out models had left to rise.  Held-out models are those that
    are scored in evaluations only, or with weight 0.

    Returns:
        None where nothing is held out, or nothing trains that could be compared (a first std of 0, no bounds).
    """
    first = first_scores(scored, baselines)
    usable = [s for s in scored if first[s.name].scale > 0.0 or not math.isfinite(s.mean)]
    z = {s.name: (s.mean - first[s.name].mean) / (first[s.name].scale or 1.0) for s in usable}
    trained = [s for s in usable if not s.held_out and s.weight != 0.0]
    held = [s for s in usable if s.held_out or s.weight == 0.0]
    if not trained or not held:
        return None
    total = math.fsum(abs(s.weight) for s in trained)
    rise = math.fsum(s.weight * z[s.name] for s in trained) / total
    room = math.fsum(first[s.name].room for s in held) / len(held)
    return min(rise, room) - math.fsum(z[s.name] for s in held) / len(held)
