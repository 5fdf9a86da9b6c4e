"""Prompts from files: a line of text each, or a column of a table."""

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Prompt

COLUMNS = ("prompt", "text", "caption")
"""Columns that are looked for where none is named."""
LONGEST = 8192
"""Characters of a prompt."""
LARGEST = 2**31
"""Bytes of a prompt file."""


def read_prompts(path: str | Path, column: str = "", field: str = "prompts") -> tuple[Prompt, ...]:
    """The prompts of a file; a prompt's id is its position, which keys its noise.

    ``.txt``: a prompt a line.  ``.jsonl``: an object or a text a line.  ``.json``: a list of those.  ``.csv`` and
    ``.tsv``: a table with a header.  ``.parquet``: a table.  HPDv2's files are of these kinds: the benchmark's are JSON
    lists of texts, the training set a table with the column ``prompt``.

    A prompt that stands there several times is read once, where it stands first: the later ones would share its group
    under another id. Blank lines at the end of a text file are no prompts.

    Args:
        path: the file, UTF-8.
        column: of the table; "" takes the first of ``prompt``, ``text`` and ``caption`` that is there.
        field: what errors call the path.

    Raises:
        InputError: a file that is missing, huge, of another kind or encoding; a prompt that is empty, too long, or not
            one of text; a missing column.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(field, str(path), "an existing file")
    if path.suffix.lower() not in READERS:
        raise InputError(field, str(path), f"a file that ends in one of {', '.join(READERS)}")
    if path.stat().st_size > LARGEST:
        raise InputError(f"size of {path.name}", path.stat().st_size, f"at most {LARGEST} bytes")
    try:
        found = list(READERS[path.suffix.lower()](path, column))
    except UnicodeDecodeError as error:
        raise InputError(f"{path.name}: byte {error.start}", error.object[error.start], "UTF-8") from None
    except OSError as error:
        raise InputError(field, str(path), f"a readable file ({error.strerror or error})") from None
    seen: dict[str, int] = {}
    for position, (place, value) in enumerate(found):
        seen.setdefault(checked(f"{path.name}: {place}", value), position)
    if not seen:
        raise InputError(path.name, "no prompts", "at least one prompt")
    return tuple(Prompt(position, text) for text, position in seen.items())


def checked(field: str, value: object) -> str:
    """A prompt without the spaces around it.

    Raises:
        InputError: one that is no text, empty, too long, or has control characters in it.
    """
    if not isinstance(value, str):
        raise InputError(field, str(value)[:60], f"text, not {type(value).__name__}")
    text = value.strip()
    if not text:
        raise InputError(field, value[:60], "a prompt that is not empty")
    if len(text) > LONGEST:
        raise InputError(field, f"{len(text)} characters", f"at most {LONGEST}")
    odd = next(
        (c for c in text if (ord(c) < 32 and c not in "\t\r\n") or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000), None
    )
    if odd is not None:
        raise InputError(field, odd, "text without control characters or halves of a surrogate pair")
    return text


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines of a file with their places; empty ones at its end are left out, a byte order mark too."""
    found = path.read_text(encoding="utf-8-sig").split("\n")
    while found and not found[-1].strip():
        found.pop()
    return ((f"line {i + 1}", line) for i, line in enumerate(found))


def from_text(path: Path, column: str) -> Iterator[tuple[str, object]]:
    """A prompt a line."""
    no_column(path, column)
    return ((place, line) for place, line in lines(path))


def no_column(path: Path, column: str) -> None:
    """Refuse a column of what is no table.

    Raises:
        InputError: a column was named.
    """
    if column:
        raise InputError("column", column, f"left out: {path.name} is no table")


def pick(place: str, record: object, column: str) -> object:
    """The prompt of a JSON value: itself, or the field of an object.

    Raises:
        InputError: an object without the field.
    """
    if not isinstance(record, dict):
        return record
    name = choose(place, [str(key) for key in record], column)
    return record[name]


def choose(place: str, names: list[str], column: str) -> str:
    """The column that holds the prompts.

    Raises:
        InputError: it is not there.
    """
    wanted = (column,) if column else COLUMNS
    for name in wanted:
        if name in names:
            return name
    raise InputError(f"{place}: columns", names[:20], f"with {' or '.join(map(repr, wanted))} (data.column names it)")


def from_json_lines(path: Path, column: str) -> Iterator[tuple[str, object]]:
    """An object or a text a line."""
    for place, line in lines(path):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{path.name}: {place}", line[:60], "one JSON value") from None
        yield place, pick(f"{path.name}: {place}", record, column)


def from_json(path: Path, column: str) -> Iterator[tuple[str, object]]:
    """A list of objects or texts."""
    try:
        records = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(path.name, str(error), "valid JSON") from None
    if not isinstance(records, list):
        raise InputError(path.name, type(records).__name__, "a list of prompts")
    for i, record in enumerate(records):
        yield f"item {i}", pick(f"{path.name}: item {i}", record, column)


def from_csv(path: Path, column: str) -> Iterator[tuple[str, object]]:
    """A table with a header, separated by commas (``.csv``) or tabs (``.tsv``)."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            name = choose(path.name, list(reader.fieldnames or []), column)
            for row in reader:
                if None in row:  # a comma outside quotes: the prompt would lose what follows it
                    place, width = f"{path.name}: line {reader.line_num}: fields", len(reader.fieldnames or [])
                    raise InputError(place, len(row) - 1 + len(row[None]), f"{width}, as the header has: quote text")
                yield f"line {reader.line_num}", row[name] or ""
        except csv.Error as error:
            raise InputError(f"{path.name}: line {reader.line_num}", str(error), "a well-formed table") from None


def from_parquet(path: Path, column: str) -> Iterator[tuple[str, object]]:
    """One column of a parquet file; the others are not read."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        legal = "read where pyarrow is installed: install branchgrpo with its extra [training]"
        raise InputError("prompts", os.fspath(path), legal) from None
    try:
        with parquet.ParquetFile(path) as file:
            name = choose(path.name, list(file.schema_arrow.names), column)
            row = 0
            for batch in file.iter_batches(columns=[name]):
                for value in batch.column(0).to_pylist():
                    yield f"row {row}", value
                    row += 1
    except arrow.ArrowException as error:
        raise InputError(path.name, str(error), "a parquet file") from None


READERS = {
    ".txt": from_text,
    ".jsonl": from_json_lines,
    ".json": from_json,
    ".csv": from_csv,
    ".tsv": from_csv,
    ".parquet": from_parquet,
}
"""Endings of prompt files, with what reads them."""
