"""What a test vector is: an operation, its arguments, and what it answers or refuses."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
SCHEMA, INDEX_SCHEMA, VERSION = "branchgrpo-vectors", "branchgrpo-vectors-index", 1

TOLERANCES = {
    "exact": (0.0, "Integers, booleans, words and numbers made by +, −, × and ÷ in one order: the same everywhere."),
    "float64": (
        1e-12,
        "One float64 formula: tens of roundings of 2^-53 = 1.1e-16, and exp, log, sin, cos, hypot and the order of "
        "sums, which IEEE 754 leaves to the library.",
    ),
    "composed": (
        1e-10,
        "Up to eight float64 steps, one after the other: 1e-14, divided by stds of at least 0.05 in a log-probability "
        "and multiplied by log-ratios and gradients of at most a hundred.",
    ),
    "cancelled": (
        1e-6,
        "Values that differ by 2^-24 of their size, so that subtracting the mean leaves 2^-53/2^-24 = 2e-9 relative; "
        "the sum's order takes the rest.",
    ),
    "float32": (4e-6, "One formula in float32: some thirty roundings of 2^-24 = 6e-8, twice that for their order."),
    "float32_composed": (
        2e-4,
        "Float32 steps one after the other: 1e-6 in the states, divided by stds of at least 0.05, times |z| ≤ 5.",
    ),
}
"""Name → bound and reason. An array may differ by the bound times its largest expected entry, a number in JSON by the
bound times itself; integers, booleans and strings never."""

PARTS = (
    "schedule", "splits", "plan", "options", "noise", "window", "windowed_plan", "depth_window", "granular_indices",
    "family", "counts", "step_weights",
)  # fmt: skip
"""Operations on plans, options and keys alone, which the protocol of an implementation takes for granted."""

DRIVEN = (
    "transition", "branch_noise", "log_probability", "rollout", "fuse", "normalize", "leaf_keys", "prune",
    "trained_subsets", "objective", "singular_rollout", "granular_advantages",
)  # fmt: skip
"""Operations of an implementation (TRACE-4)."""

OPERATIONS = (*PARTS, *DRIVEN)


@dataclass(frozen=True, eq=False)
class Case:
    """One vector.

    Attributes:
        id: its name; never given to another case.
        operation: what is asked for.
        clauses: what it judges, the main one first.
        comment: one line.
        arguments: plain JSON data.
        inputs: arrays by name.
        tolerance: name of a bound.
        expected: plain JSON data that the operation answers with.
        outputs: arrays that it answers with.
        error: for bad input, the field that the refusal has to name.
        device: where its arrays are put; no part of the vector.
    """

    id: str
    operation: str
    clauses: tuple[str, ...]
    comment: str
    arguments: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Array] = field(default_factory=dict)
    tolerance: str = "float64"
    expected: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Array] = field(default_factory=dict)
    error: str | None = None
    device: str = "cpu"

    def content(self) -> dict[str, Any]:
        """The plain data that an id stands for: everything but clauses and comment."""
        if self.error is not None:
            return {"arguments": self.arguments, "error": {"field": self.error}}
        return {"arguments": self.arguments, "tolerance": self.tolerance, "expected": self.expected}

    def data(self) -> dict[str, Any]:
        """What the JSON holds, dtypes and shapes of the arrays included."""
        kinds = {"inputs": describe(self.inputs)} | ({} if self.error else {"outputs": describe(self.outputs)})
        return {"id": self.id, "clauses": list(self.clauses), "comment": self.comment, **self.content(), **kinds}

    def arrays(self) -> dict[str, Array]:
        """The arrays by their names in the file, less the id: ``in.NAME`` and ``out.NAME``."""
        return {f"in.{n}": a for n, a in self.inputs.items()} | {f"out.{n}": a for n, a in self.outputs.items()}

    def digest(self) -> str:
        """SHA-256 of the content and the arrays: what never changes under an id."""
        return content_digest(self.operation, self.content(), self.arrays())


def describe(arrays: dict[str, Array]) -> dict[str, Any]:
    """Dtype and shape of arrays by name."""
    return {name: {"dtype": a.dtype.name, "shape": list(a.shape)} for name, a in sorted(arrays.items())}


def canonical(data: Any) -> bytes:
    """JSON with sorted keys and no blanks, in UTF-8; NaN and infinities are refused."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def content_digest(operation: str, data: Any, arrays: dict[str, Array]) -> str:
    """SHA-256 over the operation, the canonical JSON, and name, dtype, shape and little-endian bytes of each array."""
    found = hashlib.sha256(operation.encode() + b"\n" + canonical(data))
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"\n{name} {array.dtype.name} {list(array.shape)}\n".encode())
        found.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return found.hexdigest()
