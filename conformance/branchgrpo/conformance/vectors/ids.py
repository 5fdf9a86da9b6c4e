"""The list of ids: append-only, each with the digest of what it stands for."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from branchgrpo.conformance.codec import check_keys, items, text
from branchgrpo.conformance.vectors.cases import Case
from branchgrpo.reference.errors import InputError


@dataclass(frozen=True)
class Id:
    """A published id.

    Attributes:
        id: the id.
        operation: its operation.
        sha256: digest of its content.
        retired: whether its vector was withdrawn; the id is then never used again.
    """

    id: str
    operation: str
    sha256: str
    retired: bool = False


def head(ids: Sequence[Id]) -> str:
    """A digest over the first ids in order: as long as it stays, none of them was changed, moved or removed."""
    found = hashlib.sha256()
    for row in ids:
        found.update(f"{row.id} {row.operation} {row.sha256}\n".encode())
    return found.hexdigest()


def decode_ids(data: Any) -> list[Id]:
    """The ids of ``ids.json``.

    Raises:
        InputError: another form, or an id that is listed twice.
    """
    rows: dict[str, Id] = {}
    for i, row in enumerate(items(check_keys(data, {"comment", "ids"}, "ids.json")["ids"], "ids")):
        d = check_keys(row, {"id", "operation", "sha256", "retired"}, f"ids[{i}]")
        if not isinstance(d["retired"], bool):
            raise InputError(f"ids[{i}].retired", d["retired"], "true or false")
        name, operation, sha = (text(d[key], f"ids[{i}].{key}") for key in ("id", "operation", "sha256"))
        if name in rows:
            raise InputError(f"ids[{i}].id", name, "listed once")
        rows[name] = Id(name, operation, sha, d["retired"])
    return list(rows.values())


def extended(published: Sequence[Id], cases: Sequence[Case]) -> list[Id]:
    """The published ids in their order, those without a vector retired, and the new ones after them.

    Raises:
        InputError: a vector under a retired id, or one whose content is not what its id stands for.
    """
    found = {case.id: Id(case.id, case.operation, case.digest()) for case in cases}
    rows = []
    for row in published:
        own = found.pop(row.id, None)
        if own is None:
            rows.append(Id(row.id, row.operation, row.sha256, retired=True))
        elif row.retired:
            raise InputError(f"vector {row.id}", "retired", "an id that was never used")
        elif own.sha256 != row.sha256:
            raise InputError(
                f"vector {row.id}", own.sha256, f"{row.sha256}, as published; a changed vector has a new id"
            )
        else:
            rows.append(row)
    return [*rows, *found.values()]
