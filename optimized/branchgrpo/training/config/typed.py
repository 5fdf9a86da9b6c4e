"""Values checked against a type, without conversions: "4" is no number, and 1 is not true."""

from dataclasses import is_dataclass
from functools import cache
from typing import Any

from branchgrpo.reference.errors import OptionError

LEGAL = {
    "tuple_type": "a list",
    "mapping_type": "a table",
    "dict_type": "a table",
    "string_type": "text (in quotes)",
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "too_long": "a shorter list",
    "missing": "given",
}
"""Kinds of mismatch in words; others keep the words of pydantic."""
SHOWN = 200
"""Characters of a value that an error repeats."""


@cache
def adapter(kind: Any) -> Any:
    """Pydantic's validator of a type, made once."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True))


def dotted(root: str, location: tuple[int | str, ...]) -> str:
    """A place in nested tables and lists, such as ``optimizer.betas[1]``."""
    return root + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)


def short(value: object) -> object:
    """``value``, or the beginning of what it looks like where that is long."""
    text = repr(value)
    return value if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def typed(kind: Any, value: object, field: str) -> Any:
    """``value`` as a ``kind``; whole numbers are taken where a float is wanted, and nothing else is converted.

    Args:
        kind: any type but a dataclass, such as ``tuple[int, ...]``.
        value: tables as dicts, lists as tuples.
        field: dotted name of the whole, for errors.

    Raises:
        OptionError: the first mismatch, by its dotted name.
    """
    from pydantic import ValidationError

    if is_dataclass(kind):
        raise OptionError(field, short(value), "a table")
    try:
        return adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        legal = LEGAL.get(first["type"], first["msg"].removeprefix("Input should be "))
        raise OptionError(dotted(field, first["loc"]), short(first["input"]), legal) from None
