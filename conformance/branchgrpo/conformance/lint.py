"""The clause linter: spec, code and tests name each other, and nothing is left over.

``python -m branchgrpo.conformance.lint`` exits with 1 and a line for each fault.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from branchgrpo.conformance.citations import FORMULA_ROOMS, MARKED_ROOMS, Definition, definitions
from branchgrpo.conformance.clauses import ROOT, Clause, chapters, cited, load_clauses, load_divergences

MATH = re.compile(r"\$\$.+?\$\$|\$[^$\n]+\$", re.DOTALL)
EATEN = re.compile(r"\\[,;!{}\\#%]")
LINK = re.compile(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def form_faults(clauses: list[Clause]) -> Iterator[str]:
    """Duplicate ids, two prefixes in a chapter, one prefix in two chapters, numbers out of order."""
    for name, times in Counter(c.id for c in clauses).items():
        if times > 1:
            yield f"{name}: stated {times} times"
    owner: dict[str, str] = {}
    last: dict[str, Clause] = {}
    for c in clauses:
        if owner.setdefault(c.prefix, c.chapter) != c.chapter:
            yield f"spec/{c.chapter}.md: {c.id}: the prefix belongs to {owner[c.prefix]}.md"
        before = last.get(c.chapter)
        if before is not None and before.prefix != c.prefix:
            yield f"spec/{c.chapter}.md: {c.id}: the chapter's prefix is {before.prefix}"
        if before is not None and before.number > c.number:
            yield f"spec/{c.chapter}.md: {c.id}: stated after {before.id}"
        last[c.chapter] = c


def test_faults(clauses: list[Clause], found: Sequence[Definition]) -> Iterator[str]:
    """A MUST that no test is marked with, and markers that name no clause."""
    known = {c.id for c in clauses}
    marked: set[str] = set()
    for d in found:
        if d.room in MARKED_ROOMS:
            marked.update(d.marks)
            yield from (f"{d.label}: marker {name!r} names no clause" for name in d.marks if name not in known)
            yield from (f"{d.label}: marker argument {text} is no string literal" for text in d.bad_marks)
    for c in clauses:
        if c.level == "MUST" and c.id not in marked:
            yield f"spec/{c.chapter}.md: {c.id} is a MUST without a test"


def citation_faults(clauses: list[Clause], divergences: list[str], found: Sequence[Definition]) -> Iterator[str]:
    """Docstrings that cite what does not exist, and formula functions that cite nothing."""
    known = {c.id for c in clauses} | set(divergences)
    prefixes = {name.rsplit("-", 1)[0] for name in known}
    for d in found:
        stated = re.search(r"Clause: (.*?)\.(?:\s|$)", d.docstring, re.DOTALL)
        claimed = set(cited(stated[1])) if stated else set()
        for name in d.cites:
            if name not in known and (name in claimed or name.rsplit("-", 1)[0] in prefixes):
                yield f"{d.label}: the docstring cites {name}, which does not exist"
        if d.room in FORMULA_ROOMS and d.is_public_function and not set(d.cites) & known:
            yield f"{d.label}: a public function of {d.room} without a clause"


def page_faults(root: Path, known: set[str]) -> Iterator[str]:
    """Ids and links of the pages that lead nowhere, and math that a repository page would not render."""
    prefixes = {name.rsplit("-", 1)[0] for name in known}
    for page in chapters(root):
        text = page.read_text(encoding="utf-8")
        name = f"spec/{page.name}"
        for unknown in (i for i in cited(text) if i not in known and i.rsplit("-", 1)[0] in prefixes):
            yield f"{name}: names {unknown}, which does not exist"
        for target in LINK.findall(text):
            if not (page.parent / target).exists():
                yield f"{name}: link to {target}, which does not exist"
        yield from (f"{name}: {fault}" for fault in math_faults(text))


def math_faults(text: str) -> Iterator[str]:
    """Math of a page that a repository page would not render: eaten escapes, a dollar that touches a word."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    for math in MATH.findall(prose):
        if EATEN.search(math):
            yield f"an escape that Markdown eats inside math: {math[:60]!r}"
    for line in re.sub(r"\$\$.+?\$\$", "", prose, flags=re.DOTALL).splitlines():
        dollars = [m.start() for m in re.finditer(r"\$", line)]
        if len(dollars) % 2:
            yield f"an odd number of dollars: {line[:60]!r}"
        for a, b in zip(dollars[::2], dollars[1::2], strict=False):
            if re.match(r"\w\$|.\$ ", line[max(a - 1, 0) : a + 2]) or re.match(r" \$|.\$\w", line[b - 1 : b + 2]):
                yield f"a dollar that touches a word or a blank: {line[max(a - 8, 0) : b + 8]!r}"


def lint(root: Path = ROOT) -> list[str]:
    """Every fault, in a stable order; empty if spec, code and tests agree.

    Args:
        root: top of the checkout.
    """
    clauses, faults = load_clauses(root)
    divergences = load_divergences(root)
    found = definitions(root)
    known = {c.id for c in clauses} | set(divergences)
    for name, times in Counter(divergences).items():
        if times > 1:
            faults.append(f"{name}: stated {times} times")
    faults.extend(form_faults(clauses))
    faults.extend(test_faults(clauses, found))
    faults.extend(citation_faults(clauses, divergences, found))
    faults.extend(page_faults(root, known))
    return faults


def main() -> int:
    """Write the faults to standard error; 1 if there is one."""
    faults = lint()
    sys.stderr.writelines(f"{fault}\n" for fault in faults)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
