"""Results: a table for people, JSON for programs, files written whole or not at all."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from branchgrpo.cli.errors import UsageError
from branchgrpo.cli.parser import STANDARD_OUTPUT


def write_file(path: Path, text: str) -> None:
    """Write ``text`` so that the file is either the old one or the complete new one.

    Raises:
        UsageError: the folder is missing or cannot be written.
    """
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror}") from error


def deliver(result: object, target: str | None, table: Callable[[], None]) -> None:
    """Hand over a result as ``--json [FILE]`` asks.

    Args:
        result: what JSON holds; non-finite numbers are refused, for JSON has none.
        target: None for the table, ``-`` for JSON on standard output, else a file.
        table: prints the table.
    """
    if target is None:
        table()
        return
    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if target == STANDARD_OUTPUT:
        print(text, end="")
    else:
        write_file(Path(target), text)
