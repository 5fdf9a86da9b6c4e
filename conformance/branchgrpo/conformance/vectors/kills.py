"""Which mutants the vectors alone tell from a right implementation."""

from collections.abc import Sequence

from branchgrpo.conformance.mutants import (
    noise_faults,
    plan_faults,
    pruning_faults,
    rollout_faults,
    tail_faults,
    update_faults,
)
from branchgrpo.conformance.mutants.base import MUTANTS
from branchgrpo.conformance.runner import Result
from branchgrpo.conformance.vectors.cases import Case
from branchgrpo.conformance.vectors.verify import judged
from branchgrpo.reference.errors import InputError

FAULTS = (rollout_faults, noise_faults, plan_faults, tail_faults, pruning_faults, update_faults)
"""The modules whose import registers the mutants that are implementations."""


def first_kills(cases: Sequence[Case], names: Sequence[str] | None = None) -> dict[str, Result | None]:
    """For every mutant that is an implementation the first vector that it fails; None if it survives them all.

    Args:
        cases: the vectors.
        names: mutants to judge, all by default.
    """
    found: dict[str, Result | None] = {}
    if names is None:
        names = [name for name, mutant in MUTANTS.items() if mutant.implementation is not None]
    for name in names:
        make = MUTANTS[name].implementation
        if make is None:
            raise InputError("mutant", name, "one that is an implementation")
        results = (judged(make(), case) for case in cases)
        found[name] = next((result for result in results if result.status == "failed"), None)
    return found
