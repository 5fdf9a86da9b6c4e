"""A run's folder as a report reads it: finished, running, interrupted or broken off alike."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from branchgrpo.reference.errors import InputError
from branchgrpo.training.logs.jsonl import NAME, read_lines

CONFIG = "config.toml"

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class History:
    """What a run has written down so far.

    Attributes:
        folder: of the run.
        records: lines of ``metrics.jsonl``, in order.
        config_text: the resolved configuration as TOML; "" where it is not there.
        config: the same, parsed.
    """

    folder: Path
    records: Sequence[Mapping[str, Any]]
    config_text: str
    config: Mapping[str, Any]

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """The records of one kind, in order."""
        return [record for record in self.records if record.get("kind") == kind]

    @cached_property
    def iterations(self) -> list[Mapping[str, Any]]:
        """One record an iteration."""
        return self.of_kind("iteration")

    @cached_property
    def evaluations(self) -> list[Mapping[str, Any]]:
        """One record an evaluation."""
        return self.of_kind("evaluation")

    @cached_property
    def planned(self) -> int | None:
        """Iterations of the whole run; None where no configuration says."""
        found = self.config.get("run", {}).get("iterations")
        return found if isinstance(found, int) else None

    @property
    def done(self) -> int:
        """Iterations that are in the log."""
        return len(self.iterations)

    @property
    def resumed(self) -> list[int]:
        """Iterations at which a later process went on."""
        return [record["iteration"] for record in self.of_kind("start")[1:]]

    def names(self, prefix: str, suffix: str = "", kind: str = "iteration") -> list[str]:
        """What stands between prefix and suffix in the numbers' names, in order of first appearance."""
        found: dict[str, None] = {}
        for record in self.of_kind(kind):
            for name in record.get("metrics", {}):
                if name.startswith(prefix) and name.endswith(suffix) and len(name) > len(prefix) + len(suffix):
                    found[name[len(prefix) : len(name) - len(suffix)]] = None
        return list(found)

    def curve(self, name: str, kind: str = "iteration") -> tuple[Numbers, Numbers]:
        """One number over the run: iterations and values, those without the number left out; null is NaN."""
        at, values = [], []
        for record in self.of_kind(kind):
            if name in record.get("metrics", {}):
                value = record["metrics"][name]
                at.append(float(record["iteration"]))
                values.append(math.nan if value is None else float(value))
        return np.array(at), np.array(values)

    def limits(self, monitor: str) -> dict[str, float]:
        """The thresholds of one monitor that are set: ``warn``, ``stop``."""
        table = self.config.get("monitors", {}).get(monitor, {})
        return {level: float(table[level]) for level in ("warn", "stop") if isinstance(table.get(level), int | float)}


def read_history(folder: Path) -> History:
    """Read a run's folder, whatever state it is in.

    Raises:
        InputError: no ``metrics.jsonl``, or a line in it that is no JSON object.
    """
    if not (folder / NAME).is_file():
        raise InputError("run", str(folder), f"the folder of a run, with a {NAME} in it")
    records = [record for record in read_lines(folder / NAME) if isinstance(record.get("iteration"), int)]
    path = folder / CONFIG
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(str(path), str(error), "TOML") from None
    return History(folder, records, text, config)
