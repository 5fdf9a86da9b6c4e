"""TOML documents: read with care, laid over each other."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.training.config.checks import check_integer

LARGEST = 2**20
"""Bytes of a configuration."""
KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


def read_document(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        InputError: a missing, huge, unreadable or malformed file.
    """
    if not path.is_file():
        raise InputError("config", str(path), "an existing TOML file")
    if path.stat().st_size > LARGEST:
        raise InputError(f"size of {path.name}", path.stat().st_size, f"at most {LARGEST} bytes")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(path.name, str(error) or "nested too deeply", "valid TOML") from None
    except OSError as error:
        raise InputError("config", str(path), f"a readable file ({error.strerror})") from None


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``below`` with what ``above`` says: tables are joined key by key, everything else is replaced."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = laid_over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def split_override(word: str) -> tuple[str, str]:
    """``key`` and ``value`` of an override ``key=value``.

    Raises:
        OptionError: no such pair.
    """
    key, separator, value = word.partition("=")
    if not separator or not KEY.fullmatch(key):
        raise OptionError("override", word[:80], "option.name=value, such as optimizer.learning_rate=1e-5")
    return key, value


def parse_value(text: str, *, textual: bool) -> object:
    """The value of an override: TOML, or the text itself where it is no TOML or where the option holds text."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    value = table.get("value")
    known = isinstance(value, bool | int | float | list | dict) and list(table) == ["value"] and not textual
    return value if known or isinstance(value, str) else text


def put(tree: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    """``tree`` with one value replaced; ``rewards.0.weight`` reaches into a list, and one past its end adds to it.

    Raises:
        OptionError: a name that leads through something else than a table.
    """
    result: dict[str, Any] = put_at(tree, name.split("."), value, "")
    return result


def put_at(node: Any, parts: list[str], value: object, path: str) -> Any:
    """``node`` with the value at the end of ``parts`` replaced; ``path`` leads to the node."""
    if not parts:
        return value
    head, here = parts[0], f"{path}.{parts[0]}" if path else parts[0]
    if isinstance(node, list | tuple):
        index = int(head) if head.isdecimal() and len(head) < 5 else -1
        check_integer(f"{here}: index", index, 0, len(node))
        below = node[index] if index < len(node) else {}
        return (*node[:index], put_at(below, parts[1:], value, here), *node[index + 1 :])
    if node is None or node == "":
        node = {}
    if not isinstance(node, Mapping):
        raise OptionError(here, value, f"left out: {path} is no table")
    return {**node, head: put_at(node.get(head), parts[1:], value, here)}
