"""What a mutant is: the plain implementation, or its trace, with one thing wrong."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from branchgrpo.conformance.mutants.plain import PlainImplementation
from branchgrpo.conformance.record import Record

Faulty = TypeVar("Faulty", bound=PlainImplementation)


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: what is wrong, in a few words.
        clause: the clause that it breaks; a check of this clause has to kill it.
        published: row of the divergence list that it stands for, if it does; it then has to die from its trace alone.
        implementation: a faulty implementation, or
        records: a fault made in the records that a right implementation gave, or
        file: a fault made in a trace file.
    """

    name: str
    clause: str
    published: str | None = None
    implementation: type[PlainImplementation] | None = None
    records: Callable[[Sequence[Record]], list[Record]] | None = None
    file: Callable[[Path], None] | None = None


MUTANTS: dict[str, Mutant] = {}


def add(mutant: Mutant) -> None:
    """Register a mutant under its name."""
    assert mutant.name not in MUTANTS, mutant.name
    MUTANTS[mutant.name] = mutant


def mutant(clause: str, published: str | None = None) -> Callable[[type[Faulty]], type[Faulty]]:
    """Register a class that overrides one decision; its name is the class's, in words."""

    def register(faulty: type[Faulty]) -> type[Faulty]:
        words = "".join(f"_{c.lower()}" if c.isupper() else c for c in faulty.__name__).strip("_")
        add(Mutant(words, clause, published, implementation=faulty))
        faulty.name = words
        return faulty

    return register


def record_mutant(
    clause: str, published: str | None = None
) -> Callable[[Callable[[Record], Record]], Callable[[Record], Record]]:
    """Register a function that spoils every record."""

    def register(spoil: Callable[[Record], Record]) -> Callable[[Record], Record]:
        add(Mutant(spoil.__name__, clause, published, records=lambda records: [spoil(record) for record in records]))
        return spoil

    return register


def file_mutant(
    clause: str, published: str | None = None
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register a function that spoils a trace file."""

    def register(spoil: Callable[[Path], None]) -> Callable[[Path], None]:
        add(Mutant(spoil.__name__, clause, published, file=spoil))
        return spoil

    return register
