"""Findings of exact checks: an error, a tolerance, no p-value."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.properties.findings import Finding
from branchgrpo.reference.errors import InputError

Arrays = Sequence[Tensor | np.ndarray]


def as_array(values: Tensor | np.ndarray) -> Float[np.ndarray, "*shape"]:
    """Any tensor or array as float64."""
    if isinstance(values, Tensor):
        return values.detach().cpu().to(torch.float64).numpy()
    return np.asarray(values, dtype=np.float64)


def distance(found: Tensor | np.ndarray, expected: Tensor | np.ndarray, scale: float = 0.0) -> float:
    """Largest difference over the largest magnitude expected; ∞ for NaN or unlike shapes.

    Args:
        found: what was computed.
        expected: what it should be.
        scale: magnitude of what went in, if that is larger than what came out; where both are 0, 1 is taken.
    """
    a, b = as_array(found), as_array(expected)
    if a.shape != b.shape or not np.isfinite(a).all():
        return float("inf")
    if a.size == 0:
        return 0.0
    size = max(float(np.abs(b).max()), scale)
    return float(np.abs(a - b).max()) / (size if size > 0.0 else 1.0)


def close(
    name: str, clause: str, found: Tensor | np.ndarray, expected: Tensor | np.ndarray, tolerance: float
) -> Finding:
    """Found against expected: the relative distance is the statistic."""
    return Finding(name, clause, int(as_array(found).size), distance(found, expected), tolerance=tolerance)


def all_close(name: str, clause: str, found: Arrays, expected: Arrays, tolerance: float, scale: float = 0.0) -> Finding:
    """Several arrays, each relative to its own magnitude (or to ``scale``): the worst is the statistic."""
    if len(found) != len(expected):
        raise InputError(f"{name}: arrays", len(found), f"{len(expected)}")
    errors = [distance(a, b, scale) for a, b in zip(found, expected, strict=True)]
    return Finding(name, clause, sum(int(as_array(a).size) for a in found), max(errors), tolerance=tolerance)


def elementwise(name: str, clause: str, found: Arrays, expected: Arrays, scales: Arrays, tolerance: float) -> Finding:
    """Several arrays, every element's difference over its own scale: the worst is the statistic."""
    worst, count = 0.0, 0
    for a, b, scale in zip(found, expected, scales, strict=True):
        x, y = as_array(a), as_array(b)
        if x.shape != y.shape or not np.isfinite(x).all():
            worst = float("inf")
        elif x.size:
            worst = max(worst, float((np.abs(x - y) / as_array(scale)).max()))
        count += x.size
    return Finding(name, clause, count, worst, tolerance=tolerance)


def holds(name: str, clause: str, conditions: Sequence[bool], n: int | None = None) -> Finding:
    """Every condition is true: the statistic is the number of those that are not, the tolerance 0."""
    broken = sum(not condition for condition in conditions)
    return Finding(name, clause, len(conditions) if n is None else n, float(broken), tolerance=0.0)


def at_most(name: str, clause: str, error: float, tolerance: float, n: int = 1) -> Finding:
    """An error that was worked out by the check itself."""
    return Finding(name, clause, n, float(error), tolerance=tolerance)
