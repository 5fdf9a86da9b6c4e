"""The options of a run by their dotted names."""

import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from branchgrpo.training.config.schema import TrainConfig

NONE = type(None)


def optional(kind: Any) -> tuple[Any, bool]:
    """A type without its None, and whether it had one."""
    if get_origin(kind) in (Union, types.UnionType) and NONE in get_args(kind):
        rest = tuple(part for part in get_args(kind) if part is not NONE)
        return (rest[0] if len(rest) == 1 else Union[rest]), True  # noqa: UP007
    return kind, False


def row_kind(kind: Any) -> Any:
    """The dataclass of an array of tables, such as ``[[rewards]]``; None for any other type."""
    parts = get_args(kind)
    return parts[0] if get_origin(kind) is tuple and parts and is_dataclass(parts[0]) else None


def members(kind: Any) -> dict[str, Any]:
    """Fields of a dataclass with their types."""
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}


def walk(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All options under a table, ``dotted.name`` and type; an array of tables is named like one table."""
    for name, full in members(kind).items():
        inner = row_kind(full) or optional(full)[0]
        if is_dataclass(inner):
            yield from walk(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, full


@cache
def leaves() -> dict[str, Any]:
    """Every option of a run, dotted name → type."""
    return dict(walk(TrainConfig))


def nearest(name: str) -> str | None:
    """The option or table whose dotted name, or else whose last part, looks most like ``name``."""
    names = list(leaves())
    tables = {option.rsplit(".", depth)[0] for option in names for depth in range(1, option.count(".") + 1)}
    found = get_close_matches(name, [*names, *sorted(tables)], n=1, cutoff=0.7)
    if found:
        return found[0]
    last = get_close_matches(name.rsplit(".", 1)[-1], [option.rsplit(".", 1)[-1] for option in names], n=1, cutoff=0.7)
    return next((option for option in names if last and option.rsplit(".", 1)[-1] == last[0]), None)
