"""Judge a ``results.json`` of the demo: ``python -m branchgrpo.training.demo.check runs/demo/results.json``."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from branchgrpo.reference.errors import InputError
from branchgrpo.training.demo.config import LABELS
from branchgrpo.training.demo.results import SCHEMA, Criterion, acceptance

RUN_FIELDS = ("seed", "gain", "base_reward", "final_reward", "judge_base", "judge_final", "calls")


def read_results(path: Path) -> dict[str, Any]:
    """The document, with the fields that the check reads.

    Raises:
        InputError: a file that is missing, no JSON, of another schema, or without a method, run or field.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("results", str(path), f"a readable JSON file ({error})") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise InputError("results.schema", document.get("schema") if isinstance(document, dict) else None, str(SCHEMA))
    methods = document.get("methods", {})
    if set(methods) != set(LABELS):
        raise InputError("results.methods", sorted(methods), f"{sorted(LABELS)}")
    seconds = document.get("seconds", {})
    if "total" not in seconds or not all(isinstance(value, int | float) for value in seconds.values()):
        raise InputError("results.seconds", seconds, "numbers, one of them the total")
    for method, entry in methods.items():
        if not entry.get("runs"):
            raise InputError(f"results.methods.{method}.runs", entry.get("runs"), "at least one run")
        for i, run in enumerate(entry["runs"]):
            missing = [name for name in RUN_FIELDS if not isinstance(run.get(name), int | float)]
            if missing:
                raise InputError(f"results.methods.{method}.runs[{i}]", missing, "given, each a number")
    return document


def check(path: Path) -> list[Criterion]:
    """The criteria, decided anew from the runs: a stored verdict is not believed.

    Raises:
        InputError: see ``read_results``.
    """
    document = read_results(path)
    return acceptance({m: entry["runs"] for m, entry in document["methods"].items()}, document["seconds"])


def describe(criterion: Criterion) -> str:
    """One line: verdict, method, what was measured and what is required."""
    found = "not measured" if criterion.value is None else f"{criterion.value:.4g}"
    verdict = "holds" if criterion.passed else "FAILS"
    return f"{verdict}  {criterion.method:<11} {criterion.name}: {found} (required {criterion.required})"


def main(arguments: Sequence[str]) -> int:
    """Write one line a criterion to the standard output; 0 if all hold, 1 if one fails, 2 for an unusable file."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m branchgrpo.training.demo.check RESULTS.json\n")
        return 2
    try:
        criteria = check(Path(arguments[0]))
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("".join(describe(criterion) + "\n" for criterion in criteria))
    return 0 if all(criterion.passed for criterion in criteria) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
