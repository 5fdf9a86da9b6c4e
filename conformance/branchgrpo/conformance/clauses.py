"""The clause registry: what `spec/` says, and the marker by which a test names the clauses it judges."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeVar, cast

from branchgrpo.reference.errors import OptionError

CHECKOUT = Path(__file__).resolve().parents[3]
ROOT = CHECKOUT if (CHECKOUT / "spec" / "README.md").is_file() else Path(__file__).resolve().parents[1]
"""Where `spec/` lies: the top of the checkout, or the package ``branchgrpo`` of an installed wheel."""

ID = re.compile(r"\b(?:DIV-[A-Z]{1,2}\d+|[A-Z]{3,}-\d+)\b")
RANGE = re.compile(r"\b([A-Z]{3,})-(\d+)\s*…\s*([A-Z]{3,})-(\d+)\b")
STATEMENT = re.compile(
    r"^\*\*(?P<id>[A-Z]{3,}-\d+)\*\* \((?P<level>MUST|SHOULD|MAY)\) (?P<text>.+?)\s*\*Source: (?P<source>[^*]+)\*$",
    re.DOTALL,
)
OPENING = re.compile(r"^\*\*(?!DIV-)[A-Z]{3,}-[^*\s]+\*\*", re.MULTILINE)
DIVERGENCE = re.compile(r"^\*\*(?P<id>DIV-[A-Z]{1,2}\d+)\*\* ", re.MULTILINE)

Level = Literal["MUST", "SHOULD", "MAY"]
Marked = TypeVar("Marked")
MARK = "__clauses__"
"""Attribute that the marker leaves on a function or class."""


def clause(*ids: str) -> Callable[[Marked], Marked]:
    """Mark a test or a check with the clauses it judges: it fails if an implementation breaks one of them.

    The linter reads the marker from the source, so the ids are string literals; that they exist is its job too.

    Args:
        ids: at least one clause id, such as ``"NORM-3"``.
    """
    if not ids or not all(ID.fullmatch(i) for i in ids):
        raise OptionError("clause", ids, "at least one id like 'NORM-3'")

    def mark(function: Marked) -> Marked:
        setattr(function, MARK, (*ids, *getattr(function, MARK, ())))
        return function

    return mark


@dataclass(frozen=True)
class Clause:
    """One normative statement of a chapter."""

    id: str
    level: Level
    text: str
    source: str
    chapter: str

    @property
    def prefix(self) -> str:
        """The part of the id before the number; one a chapter."""
        return self.id.rsplit("-", 1)[0]

    @property
    def number(self) -> int:
        """The part of the id after the prefix."""
        return int(self.id.rsplit("-", 1)[1])

    @property
    def summary(self) -> str:
        """The first sentence, without what follows the first paragraph."""
        first = self.text.split("\n\n")[0].replace("\n", " ")
        return re.split(r"(?<=[.:]) (?=[A-Z$`(])", first)[0].rstrip(":")


def statements(text: str) -> Iterator[str]:
    """Every block of a chapter that opens like a clause, up to the next opening or heading."""
    starts = [m.start() for m in OPENING.finditer(text)]
    for start, end in pairwise([*starts, len(text)]):
        block = re.split(r"^#|^```toml", text[start:end], maxsplit=1, flags=re.MULTILINE)[0].strip()
        closed = re.match(r".*?\*Source: [^*]+\*$", block, re.DOTALL | re.MULTILINE)
        yield closed.group(0) if closed else block


def parse_chapter(text: str, chapter: str) -> tuple[list[Clause], list[str]]:
    """The clauses of one chapter, and a line for every block that opens like a clause and is none."""
    clauses, faults = [], []
    for block in statements(text):
        found = STATEMENT.match(block)
        if found is None:
            faults.append(f"spec/{chapter}.md: not `**ID** (MUST|SHOULD|MAY) text *Source: …*`: {block[:60]!r}")
        else:
            level = cast(Level, found["level"])
            clauses.append(Clause(found["id"], level, found["text"], found["source"].rstrip("."), chapter))
    return clauses, faults


def chapters(root: Path = ROOT) -> list[Path]:
    """The pages of `spec/`, studies and tables left out."""
    return sorted((root / "spec").glob("*.md"))


def load_clauses(root: Path = ROOT) -> tuple[list[Clause], list[str]]:
    """All clauses in chapter order, and the faults of form found on the way."""
    parts = [parse_chapter(page.read_text(encoding="utf-8"), page.stem) for page in chapters(root)]
    return [c for clauses, _ in parts for c in clauses], [f for _, faults in parts for f in faults]


def load_divergences(root: Path = ROOT) -> list[str]:
    """Ids of `spec/divergences.md`, in the order of the page."""
    page = root / "spec" / "divergences.md"
    return [m["id"] for m in DIVERGENCE.finditer(page.read_text(encoding="utf-8"))] if page.exists() else []


def cited(text: str) -> list[str]:
    """Ids named in a text, in order and once each; ``PLAN-1 … PLAN-4`` names four."""
    found: dict[str, None] = {}
    spans = []
    for m in RANGE.finditer(text):
        if m[1] == m[3]:
            spans.append(m.span())
            found |= dict.fromkeys(f"{m[1]}-{i}" for i in range(int(m[2]), int(m[4]) + 1))
    for m in ID.finditer(text):
        if not any(a <= m.start() < b for a, b in spans):
            found[m[0]] = None
    return list(found)
