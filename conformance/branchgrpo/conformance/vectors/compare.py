"""Comparing what an operation answered with what a vector expects."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from branchgrpo.conformance.vectors.cases import TOLERANCES, Array, Case

Answer = Mapping[str, Any]
"""What an operation answers: arrays and plain JSON data by name."""


def split_answer(answer: Answer) -> tuple[dict[str, Any], dict[str, Array]]:
    """JSON data and arrays of an answer."""
    arrays = {name: value for name, value in answer.items() if isinstance(value, np.ndarray)}
    return {name: value for name, value in answer.items() if name not in arrays}, arrays


def difference(case: Case, answer: Answer) -> str | None:
    """Where an answer departs from a case, in words; None if it does not."""
    bound = TOLERANCES[case.tolerance][0]
    data, arrays = split_answer(answer)
    for what, found, wanted in (("answers", data, case.expected), ("arrays", arrays, case.outputs)):
        if found.keys() != wanted.keys():
            return f"{what}: {sorted(found)}, expected {sorted(wanted)}"
    for name, value in case.expected.items():
        if (fault := data_difference(data[name], value, bound, name)) is not None:
            return fault
    for name, array in case.outputs.items():
        if (fault := array_difference(arrays[name], array, bound, name)) is not None:
            return fault
    return None


def data_difference(found: Any, wanted: Any, bound: float, where: str) -> str | None:
    """Departure of JSON data: numbers with a fraction within the bound, all else equal; ``least``, ``most`` a range."""
    if isinstance(wanted, dict) and wanted.keys() == {"least", "most"} and found != wanted:
        inside = isinstance(found, int) and wanted["least"] <= found <= wanted["most"]
        return None if inside else f"{where}: {found}, expected {wanted['least']} to {wanted['most']}"
    if isinstance(wanted, dict) and isinstance(found, dict) and found.keys() == wanted.keys():
        parts = [(found[key], wanted[key], f"{where}.{key}") for key in wanted]
    elif isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        parts = [(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(found, wanted, strict=True))]
    elif type(wanted) is float and type(found) in (int, float):
        close = abs(found - wanted) <= bound * abs(wanted)
        return None if close else f"{where}: {found!r}, expected {wanted!r} to {bound:g}"
    else:
        same = type(found) is type(wanted) and found == wanted
        return None if same else f"{where}: {found!r}, expected {wanted!r}"
    return next((fault for part in parts if (fault := data_difference(part[0], part[1], bound, part[2]))), None)


def array_difference(found: Array, wanted: Array, bound: float, where: str) -> str | None:
    """Departure of an array: shape, kind, then the bound times the largest expected entry."""
    if found.shape != wanted.shape:
        return f"{where}: shape {found.shape}, expected {wanted.shape}"
    if found.dtype != wanted.dtype:
        return f"{where}: dtype {found.dtype}, expected {wanted.dtype}"
    if wanted.size == 0:
        return None
    if wanted.dtype.kind != "f" or bound == 0.0:
        wrong = int(np.count_nonzero(found != wanted))
        return f"{where}: {wrong} of {wanted.size} entries differ" if wrong else None
    error, scale = float(np.abs(found - wanted).max()), float(np.abs(wanted).max())
    if error <= bound * scale:
        return None
    return f"{where}: off by {error:.3g}, largest entry {scale:.3g}, {bound:g} of it allowed"
