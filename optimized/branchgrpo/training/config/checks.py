"""Checks of single values: each raises ``OptionError`` with the dotted name of its option."""

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from branchgrpo.reference.errors import OptionError, is_integer

LONGEST_TEXT = 4096
"""Characters of a text in a configuration."""


def check_integer(field: str, value: object, low: int, high: int | None = None) -> None:
    """Refuse what is no integer in ``low..high``; no ``high`` leaves the top open."""
    if not isinstance(value, int) or not is_integer(value) or value < low or (high is not None and value > high):
        raise OptionError(field, value, f"an integer ≥ {low}" if high is None else f"an integer in {low}..{high}")


def check_number(
    field: str,
    value: object,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    infinite: bool = False,
) -> None:
    """Refuse what is no number between ``low`` and ``high``.

    Args:
        field: dotted name.
        value: what was given.
        low, high: bounds, themselves allowed unless open.
        open_low, open_high: whether a bound is left out.
        infinite: whether ∞ is allowed.
    """
    bounds = [f"{'>' if open_low else '≥'} {low:g}"] * (low > -math.inf)
    bounds += [f"{'<' if open_high else '≤'} {high:g}"] * (high < math.inf)
    legal = " and ".join(["a number"] * infinite + ["finite"] * (not infinite) + bounds)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise OptionError(field, value, legal)
    below = value <= low if open_low and low > -math.inf else value < low
    above = value >= high if open_high else value > high
    if below or above or (math.isinf(value) and not infinite):
        raise OptionError(field, value, legal)


def check_flag(field: str, value: object) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise OptionError(field, value, "true or false")


def check_text(field: str, value: object, *, empty: bool = True) -> None:
    """Refuse what is no single line of text."""
    if not isinstance(value, str) or len(value) > LONGEST_TEXT or not value.isprintable() or not (value or empty):
        shown = value[:60] if isinstance(value, str) else value
        raise OptionError(field, shown, f"one line of printable text, at most {LONGEST_TEXT} characters")


def near(word: str, names: Iterable[str], alike: float = 0.5) -> str | None:
    """The name that looks most like ``word``, if any is ``alike`` enough (0 to 1)."""
    found = get_close_matches(word, list(names), n=1, cutoff=alike)
    return found[0] if found else None


def check_name(field: str, value: object, names: Iterable[str], more: str = "") -> None:
    """Refuse a word that is none of ``names``, with the nearest of them.

    Args:
        field: dotted name.
        value: what was given.
        names: what is legal.
        more: what is legal beside the names.
    """
    known = list(names)
    if value in known:
        return
    close = near(str(value), known)
    listed = f"one of {', '.join(known)}" if len(known) <= 12 else f"a known name, such as {', '.join(known[:6])}"
    legal = f"{close!r}, or another of {len(known)} known names" if close and len(known) > 12 else listed
    raise OptionError(field, value, f"{legal}{more}")


def plain(field: str, value: object) -> Any:
    """``value`` as options hold it: text, numbers, flags, lists (as tuples) and tables, nothing else, and no NaN.

    Raises:
        OptionError: anything else, such as a date.
    """
    if isinstance(value, Mapping):
        for key in value:
            check_text(f"{field}: key", key, empty=False)
        return {key: plain(f"{field}.{key}", part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(plain(f"{field}[{i}]", part) for i, part in enumerate(value))
    if isinstance(value, float) and math.isnan(value):
        raise OptionError(field, value, "a number")
    if isinstance(value, bool | int | float | str):
        return value
    raise OptionError(field, value, "text, a number, true, false, a list or a table")
