"""``metrics.jsonl``: always written, one JSON object a line, cut back to the checkpoint on resume."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from branchgrpo.reference.errors import InputError

NAME = "metrics.jsonl"


def plain(value: Any, path: str, notes: list[str]) -> Any:
    """``value`` with every number that JSON cannot hold replaced by None, and a note that says what it was."""
    if isinstance(value, float) and not math.isfinite(value):
        notes.append(f"{path} is {value}")
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(entry, f"{path}/{key}" if path else str(key), notes) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, f"{path}[{i}]", notes) for i, entry in enumerate(value)]
    return value


def line_of(record: Mapping[str, Any]) -> bytes:
    """One line of the log; ``notes`` tells which numbers were not finite."""
    notes: list[str] = []
    ready = plain(record, "", notes)
    if notes:
        ready["notes"] = [*ready.get("notes", []), *notes]
    return json.dumps(ready, ensure_ascii=False, allow_nan=False).encode() + b"\n"


class JsonLines:
    """The log of a run, open for appending; every line reaches the file at once.

    On resume everything after the checkpoint's length is cut off, so that no iteration is in the log twice.
    """

    def __init__(self, folder: str | Path, length: int = 0) -> None:
        """Open ``folder/metrics.jsonl`` and keep its first ``length`` bytes.

        Raises:
            InputError: a file that is shorter than ``length``, or whose ``length`` is not the end of a line.
        """
        self.path = Path(folder) / NAME
        self.file = self.path.open("ab")
        size = self.path.stat().st_size
        if size < length:
            self.file.close()
            raise InputError(f"size of {self.path}", size, f"at least {length} bytes, as the checkpoint says")
        if length and not ends_a_line(self.path, length):
            self.file.close()
            raise InputError(
                f"{self.path}: byte {length}", "within a line", "the end of a line, as the checkpoint says"
            )
        self.file.truncate(length)
        self.file.seek(length)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object and hand it to the system, so that a killed process loses no line."""
        self.file.write(line_of(record))
        self.file.flush()

    def length(self) -> int:
        """Bytes written so far, on disk when this returns: what a checkpoint notes down."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.tell()

    def close(self) -> None:
        """Write everything to disk and close."""
        if not self.file.closed:
            try:
                self.length()
            finally:
                self.file.close()


def ends_a_line(path: Path, length: int) -> bool:
    """Whether byte ``length`` of a file follows a line feed."""
    with path.open("rb") as file:
        file.seek(length - 1)
        return file.read(1) == b"\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a log that may still be written to: a last line without its end is left out.

    Raises:
        InputError: a complete line that is no JSON object; names its number.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise InputError(f"{path}, line {number}", str(error), "a JSON object") from None
            if not isinstance(record, dict):
                raise InputError(f"{path}, line {number}", type(record).__name__, "a JSON object")
            yield record
