"""Putting a vector's question to somebody: an implementation, or whoever answers for plans and keys."""

from collections.abc import Callable, Mapping
from typing import Any

from branchgrpo.conformance.vectors.cases import DRIVEN, Case
from branchgrpo.conformance.vectors.operations import DRIVERS

Answering = Callable[[Case], dict[str, Any]]


def answering(implementation: Any, operation: str) -> Answering | None:
    """How an implementation answers an operation; None if it does not have it.

    Operations of the protocol are driven through it. All others are looked up in ``vector_operations``, which an
    implementation may have: operation → function from a case to its answer, arrays and plain JSON data by name.
    """
    if operation in DRIVEN:
        if operation not in implementation.capabilities:
            return None
        return lambda case: DRIVERS[operation](implementation, case)
    others: Mapping[str, Answering] = getattr(implementation, "vector_operations", {})
    return others.get(operation)
