"""What a check is: a function that judges one clause from a trace, or from the operations of an implementation."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

import torch

from branchgrpo.conformance.record import Record
from branchgrpo.reference.implementation import Implementation

Judged = TypeVar("Judged")
Item = TypeVar("Item")


class CheckFailedError(AssertionError):
    """The subject breaks the clause; the message says where, what was found and what was expected."""


class UnsupportedError(Exception):
    """The clause cannot be judged: an array, an operation or enough samples are missing."""


@dataclass(frozen=True)
class Check(Generic[Judged]):
    """A check and the clause that it judges."""

    name: str
    clause: str
    run: Callable[[Judged], None]
    summary: str


TraceFunction = Callable[[Sequence[Record]], None]
TRACE_CHECKS: list[Check[Sequence[Record]]] = []


def trace_check(function: TraceFunction) -> TraceFunction:
    """Register a function over records; its clause is that of its ``@clause`` marker, its name the function's."""
    TRACE_CHECKS.append(as_check(function))
    return function


@dataclass(frozen=True)
class Subject:
    """An implementation under judgement and the device that its arrays are on."""

    implementation: Implementation
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def operation(self, name: str) -> Implementation:
        """The implementation, if it has an operation.

        Raises:
            UnsupportedError: it has not.
        """
        if name not in self.implementation.capabilities:
            raise UnsupportedError(f"no operation {name}")
        return self.implementation


OperationFunction = Callable[[Subject], None]
OPERATION_CHECKS: list[Check[Subject]] = []


def operation_check(function: OperationFunction) -> OperationFunction:
    """Register a function over a subject; its clause is that of its ``@clause`` marker, its name the function's."""
    OPERATION_CHECKS.append(as_check(function))
    return function


def as_check(function: Callable[[Judged], None]) -> Check[Judged]:
    """A check from a function that is marked with one clause."""
    marked: Any = function
    (clause,) = marked.__clauses__
    return Check(marked.__name__, clause, function, (marked.__doc__ or "").strip().splitlines()[0])


def fail(message: str) -> NoReturn:
    """Report a broken clause."""
    raise CheckFailedError(message)


def expect(holds: bool, message: str) -> None:
    """Report a broken clause unless it holds."""
    if not holds:
        fail(message)


def needs(records: Sequence[Record], *names: str) -> list[tuple[int, Record]]:
    """The records that dumped all these fields, numbered.

    Raises:
        UnsupportedError: there is none.
    """
    found = [(r, record) for r, record in enumerate(records) if record.has(*names)]
    return some(found, " and ".join(names))


def some(found: list[Item], what: str) -> list[Item]:
    """Return ``found``; not supported if it is empty."""
    if not found:
        raise UnsupportedError(f"no record has {what}")
    return found


def each_supported(actions: Iterable[Callable[[], None]]) -> None:
    """Judge a clause by every action that the subject can do; unsupported only if it can do none of them.

    For clauses that hold for several kernels or options, of which an implementation may have some.

    Raises:
        UnsupportedError: the reason that the last of them gave.
    """
    reason, judged = UnsupportedError("nothing to judge"), False
    for action in actions:
        try:
            action()
            judged = True
        except UnsupportedError as found:
            reason = found
    if not judged:
        raise reason


def rounding_hint(error: float) -> str:
    """A guess, for a message, at where a relative error comes from: half a unit of float32 is 2⁻²⁵ … 2⁻²⁴."""
    return " (float32 rounding?)" if 2.0**-28 <= error <= 2.0**-23 else ""


def expect_close(found: torch.Tensor, wanted: torch.Tensor, limit: float, what: str) -> None:
    """Report a broken clause unless two tensors agree to ``limit`` of the largest expected entry."""
    if found.shape != wanted.shape:
        fail(f"{what}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}")
    if wanted.numel() == 0:
        return
    a, b = found.detach().double().cpu(), wanted.detach().double().cpu()
    error = float((a - b).abs().max()) / max(float(b.abs().max()), 1e-300)
    if not error <= limit:
        fail(f"{what}: off by {error:.3g} of the largest entry{rounding_hint(error)}, {limit:.1g} allowed")


def expect_refused(action: Callable[[], object], what: str) -> None:
    """Report a broken clause if bad input is accepted; an operation that is missing refuses nothing."""
    try:
        action()
    except UnsupportedError:
        raise
    except Exception:
        return
    fail(f"{what} is accepted")
