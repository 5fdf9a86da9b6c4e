"""What is written down of every score, obtained or missing (REW-2)."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class LeafScore:
    """One leaf under one reward model.

    Attributes:
        model, version: of the reward model.
        prompt, text: id and words of the leaf's prompt.
        leaf: index of the leaf within its prompt, level order, roots outermost.
        value: the score, None where it is missing or not finite.
        error: why there is no value.
    """

    model: str
    version: str
    prompt: int
    text: str
    leaf: int
    value: float | None
    error: str | None = None


ScoreLog = Callable[[Sequence[LeafScore]], None]
"""Takes the scores of one step, once, before any error is raised."""


def no_log(scores: Sequence[LeafScore]) -> None:
    """Write nothing down."""


class JsonLinesLog:
    """A ``ScoreLog`` that appends one JSON object a score to a file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __call__(self, scores: Sequence[LeafScore]) -> None:
        """Append and close, so that the lines are on disk before a step fails."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(score), ensure_ascii=False) + "\n" for score in scores)
