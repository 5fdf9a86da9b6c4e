"""Values checked against a type, without conversions: "4" is no number, and 1 is not true."""

from functools import cache
from typing import Any

from branchgrpo.reference.errors import OptionError

LEGAL = {
    "dataclass_type": "a table",
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


@cache
def adapter(kind: Any) -> Any:
    """Pydantic's validator of a type, made once."""
    from pydantic import ConfigDict, TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        return TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
    except PydanticUserError:  # a dataclass brings its own configuration
        return TypeAdapter(kind)


def dotted(root: str, location: tuple[int | str, ...]) -> str:
    """A place in nested tables and lists, such as ``rewards[1].weight``."""
    text = root
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def typed(kind: Any, value: object, field: str) -> Any:
    """``value`` as a ``kind``; whole numbers are taken where a float is wanted, and nothing else is converted.

    Args:
        kind: any type, such as ``tuple[int, ...]`` or a dataclass.
        value: tables as dicts, lists as tuples.
        field: name of the whole, for errors; "" where there is none.

    Raises:
        OptionError: the first mismatch, by its dotted name.
    """
    from pydantic import ValidationError

    try:
        return adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, OptionError):
            raise cause from None
        legal = LEGAL.get(first["type"], first["msg"].removeprefix("Input should be "))
        raise OptionError(dotted(field, first["loc"]), first["input"], legal) from None
