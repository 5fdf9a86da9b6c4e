"""From a judge's words to a number, or to a reason why not: a score is never guessed."""

import math
import re
from dataclasses import dataclass

from branchgrpo.reference.errors import OptionError
from branchgrpo.rewards.endpoint import EXCERPT

NUMBER = r"""(?P<value>[-+]?\d+(?:\.\d+)?)
    (?:\s*/\s*(?P<top>\d+(?:\.\d+)?))?     # "4 / 5"
    (?!\w|[.,]\d|\s*%|\s*/)                # a longer number, a percentage or another fraction is not taken apart"""


class UnreadableScore(Exception):
    """An answer in which the score cannot be told.

    Attributes:
        reason: what is wrong with it, with an excerpt.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True)
class ScoreParser:
    """Finds ``label: number`` in an answer, in plain text, Markdown or JSON.

    Attributes:
        label: the words before the number; case, spaces and underscores do not matter.
        low, high: legal scores; a number outside is a failure, not clipped.
    """

    label: str = "Final Score"
    low: float = 1.0
    high: float = 5.0

    def __post_init__(self) -> None:
        if not self.label.split():
            raise OptionError("parser.label", self.label, "not empty")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise OptionError("parser.(low, high)", (self.low, self.high), "finite, low < high")

    @property
    def pattern(self) -> re.Pattern[str]:
        """Label, an optional remark in brackets, a colon or equals sign with quotes and asterisks around, a number."""
        words = r"[\s_]+".join(re.escape(word) for word in self.label.split())
        return re.compile(
            rf"""{words}["'*_\s]*(?:\([^)]*\))?["'*_\s]*[:=]["'*_\s]*{NUMBER}""", re.IGNORECASE | re.VERBOSE
        )

    def __call__(self, answer: str) -> float:
        """The score.

        Raises:
            UnreadableScore: no score, several that differ, one of another scale, or one outside [low, high].
        """
        excerpt = answer if len(answer) <= EXCERPT else f"{answer[: EXCERPT // 2]} … {answer[-EXCERPT // 2 :]}"
        found = list(self.pattern.finditer(answer))
        values = sorted({float(match["value"]) for match in found})
        if not values:
            raise UnreadableScore(f"no {self.label!r} in {excerpt!r}")
        if len(values) > 1:
            raise UnreadableScore(f"several values of {self.label!r}, {values}, in {excerpt!r}")
        if any(match["top"] is not None and float(match["top"]) != self.high for match in found):
            raise UnreadableScore(f"{self.label!r} of another scale than {self.low:g} … {self.high:g} in {excerpt!r}")
        if not self.low <= values[0] <= self.high:
            raise UnreadableScore(f"{self.label!r} is {values[0]:g}, outside {self.low:g} … {self.high:g}")
        return values[0]
