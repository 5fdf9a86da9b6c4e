"""The worked examples of `spec/`: the fenced TOML blocks of a chapter, so that text and test cannot drift apart."""

import re
import tomllib
from pathlib import Path
from typing import Any

from branchgrpo.conformance.clauses import ROOT
from branchgrpo.reference.errors import InputError

BLOCK = re.compile(r"^```toml\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def load_examples(chapter: str, root: Path = ROOT) -> dict[str, Any]:
    """The tables of a chapter's examples, merged in order.

    Args:
        chapter: name of the page, such as ``"fusion"``.
        root: top of the checkout.

    Raises:
        InputError: a page without an example.
        tomllib.TOMLDecodeError: a block that is no TOML, or one table stated twice.
    """
    text = (root / "spec" / f"{chapter}.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    if not blocks:
        raise InputError(f"examples of spec/{chapter}.md", 0, "at least one ```toml block")
    return tomllib.loads("\n".join(blocks))
