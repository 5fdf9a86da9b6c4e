"""``scores.jsonl``: every leaf's score by every model, also of an iteration that failed."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from branchgrpo.training.engine.iteration import Scores

NAME = "scores.jsonl"


class ScoreFile:
    """Appends one JSON object a score: iteration, member (k, λ) of a plan family, and what ``LeafScore`` holds."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.start = 0

    def mark(self) -> None:
        """Note where an iteration begins."""
        self.start = self.path.stat().st_size if self.path.exists() else 0

    def rewind(self) -> None:
        """Take back what was written since: the iteration will be sampled again."""
        if self.path.exists():
            os.truncate(self.path, self.start)

    def __call__(self, iteration: int, scores: Scores) -> None:
        """Append and close, so that the lines are on disk before a step fails."""
        with self.path.open("a", encoding="utf-8") as file:
            for member, score in scores:
                record = {"iteration": iteration, "member": member, **asdict(score)}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
