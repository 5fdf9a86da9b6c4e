"""Mistakes on the command line, each answered by one line that names the nearest valid name."""

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """What was typed cannot be run; the message is the whole answer and the exit code is 2."""


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The valid name that looks most like ``word``; None where nothing looks like it."""
    by_lower = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[found[0]] if found else None


def unknown(kind: str, word: str, names: Iterable[str], fallback: str) -> UsageError:
    """The error for a name that does not exist.

    Args:
        kind: what was named, such as ``preset``.
        word: what was typed.
        names: the valid names.
        fallback: what to do where no valid name is near.
    """
    near = nearest(word, names)
    hint = f"did you mean {near!r}?" if near else fallback
    return UsageError(f"unknown {kind} {word!r}: {hint}")
