"""Judging by vectors alone.

``python -m branchgrpo.conformance.vectors.verify module:Object`` says how an implementation fares; without a name, how
plans, options and keys do.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from branchgrpo.conformance.runner import Result
from branchgrpo.conformance.subject_loading import load_implementation
from branchgrpo.conformance.vectors.answer import answering
from branchgrpo.conformance.vectors.cases import Case
from branchgrpo.conformance.vectors.compare import difference
from branchgrpo.conformance.vectors.files import FOLDER, read_vectors
from branchgrpo.conformance.vectors.parts import ReferenceParts
from branchgrpo.reference.errors import BranchGRPOError, InputError


def judged(implementation: Any, case: Case) -> Result:
    """One vector put to an implementation.

    A refusal may be any exception; one of ours, whose field can be read, has to be about the field at fault.
    """
    clause, ask = case.clauses[0], answering(implementation, case.operation)
    if ask is None:
        return Result(case.id, clause, "unsupported", f"{implementation.name} has no operation {case.operation}")
    try:
        answer = ask(case)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        if case.error is None:
            return Result(case.id, clause, "failed", found)
        if isinstance(error, BranchGRPOError) and case.error not in error.field:
            return Result(case.id, clause, "failed", f"refused for another reason than {case.error}: {found}")
        return Result(case.id, clause, "passed")
    if case.error is not None:
        return Result(case.id, clause, "failed", f"accepted, but {case.error} is bad")
    fault = difference(case, answer)
    return Result(case.id, clause, "passed") if fault is None else Result(case.id, clause, "failed", fault)


def verify(implementation: Any, folder: Path | None = None, device: str = "cpu") -> list[Result]:
    """Put every vector to an implementation.

    Args:
        implementation: operations on arrays, as ``branchgrpo.reference.implementation`` describes them; it may have
            ``vector_operations`` for the others (see ``answering``).
        folder: the vectors, by default those of the checkout.
        device: where the arrays are put.

    Returns:
        One result a vector, its id as the check's name; ``unsupported`` where the operation is missing.
    """
    return [judged(implementation, replace(case, device=device)) for case in read_vectors(folder or FOLDER)]


def main(arguments: Sequence[str]) -> int:
    """Write a line for each failure, and the counts; 1 if there is a failure."""
    try:
        subject: Any = load_implementation(arguments[0]) if arguments else ReferenceParts()
        results = verify(subject)
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    failed = [result for result in results if result.status == "failed"]
    sys.stdout.writelines(f"{result.check} ({result.clause}): {result.detail}\n" for result in failed)
    counts = {status: sum(r.status == status for r in results) for status in ("passed", "failed", "unsupported")}
    sys.stdout.write(f"{subject.name}: " + ", ".join(f"{n} {status}" for status, n in counts.items()) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
