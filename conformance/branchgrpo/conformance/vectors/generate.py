"""Making the vectors: questions from the ``ask_`` modules, answers from the reference.

``python -m branchgrpo.conformance.vectors.generate`` writes ``spec/vectors/v1``. An id that is published keeps what it
says: a vector whose content would change is refused, and a changed one gets a new id.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from branchgrpo.conformance.adapters.reference import ReferenceImplementation
from branchgrpo.conformance.vectors.answer import answering
from branchgrpo.conformance.vectors.ask_families import family_parts
from branchgrpo.conformance.vectors.ask_objective import objectives
from branchgrpo.conformance.vectors.ask_parts import parts
from branchgrpo.conformance.vectors.ask_rollouts import all_rollouts
from branchgrpo.conformance.vectors.ask_steps import steps
from branchgrpo.conformance.vectors.ask_tail import tail
from branchgrpo.conformance.vectors.cases import PARTS, Case
from branchgrpo.conformance.vectors.compare import split_answer
from branchgrpo.conformance.vectors.files import FOLDER, write_vectors
from branchgrpo.conformance.vectors.parts import ReferenceParts
from branchgrpo.reference.errors import BranchGRPOError, InputError


def questions() -> list[Case]:
    """Every vector without its answer.

    Raises:
        InputError: an id that is used twice.
    """
    asked = [*parts(), *family_parts(), *steps(), *tail(), *all_rollouts(), *objectives()]
    for name, times in Counter(case.id for case in asked).items():
        if times > 1:
            raise InputError("vector id", name, "used once")
    return asked


def answered(case: Case) -> Case:
    """A case with the reference's answer.

    Raises:
        InputError: bad input that the reference accepts, or refuses for another reason.
    """
    ask = answering(ReferenceParts() if case.operation in PARTS else ReferenceImplementation(), case.operation)
    assert ask is not None
    if case.error is not None:
        try:
            ask(case)
        except BranchGRPOError as error:
            if case.error not in error.field:
                raise InputError(f"error of {case.id}", str(error), f"about {case.error}") from error
            return case
        raise InputError(f"error of {case.id}", "none", f"about {case.error}")
    data, arrays = split_answer(ask(case))
    return replace(case, expected={**data, **case.expected}, outputs=arrays)


def generate() -> list[Case]:
    """Every vector, by operation and in the order in which it was asked."""
    return [answered(case) for case in questions()]


def main(arguments: Sequence[str]) -> int:
    """Write the vectors, or those of another folder that is named; 1 if a published one would change."""
    folder = Path(arguments[0]) if arguments else FOLDER
    try:
        count = write_vectors(folder, generate())
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stderr.write(f"{count} vectors in {folder}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
