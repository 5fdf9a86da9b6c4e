"""The clause linter on this checkout, and on small ones with one fault each."""

import re
import sys

import pytest

from branchgrpo.conformance.citations import definitions
from branchgrpo.conformance.clauses import ROOT, chapters, cited, clause, load_clauses, load_divergences, parse_chapter
from branchgrpo.conformance.examples import load_examples
from branchgrpo.conformance.lint import lint
from branchgrpo.conformance.traceability import PAGE, render
from branchgrpo.reference.errors import BranchGRPOError

CONCEPTS = [
    "plan", "schedule", "kernels", "noise", "rollout", "log_probability", "reward", "fusion", "normalization",
    "pruning", "objective", "windows", "singular", "granularity", "oracle", "trace", "errors",
]  # fmt: skip
READING = re.compile(
    r"^\| .+ \| .+ \| `(\w+)\.(\w+)` \| ([A-Z]+-\d+) \| `(test_\w+\.py)::(test_\w+)` \|$", re.MULTILINE
)


def test_spec_code_and_tests_agree():
    assert lint() == []


def test_every_concept_has_a_chapter_with_clauses_and_an_example():
    clauses, _ = load_clauses()
    for concept in CONCEPTS:
        assert [c for c in clauses if c.chapter == concept], concept
        assert load_examples(concept), concept
    assert {c.chapter for c in clauses} == set(CONCEPTS)


def test_the_traceability_page_is_current():
    assert (ROOT / PAGE).read_text(encoding="utf-8") == render(), "run `make spec`"


def test_every_row_of_the_reading_page_holds():
    text = (ROOT / "spec/reading.md").read_text(encoding="utf-8")
    rows = READING.findall(text)
    assert len(rows) == len([line for line in text.splitlines() if line.startswith("|") and "`" in line]) > 30
    known = {(d.path, d.name): d for d in definitions()}
    for module, function, name, file, test in rows:
        code = known[f"reference/branchgrpo/reference/{module}.py", function]
        assert name in code.cites, f"{module}.{function} does not cite {name}"
        assert name in known[f"tests/{file}", test].marks, f"{test} is not marked {name}"


def test_every_divergence_is_decided_somewhere():
    """A chapter or a docstring of the code names each of them."""
    pages = "".join(p.read_text(encoding="utf-8") for p in chapters() if p.stem != "divergences")
    named = set(cited(pages)) | {name for d in definitions() for name in d.cites}
    assert [name for name in load_divergences() if name not in named] == []


GOOD = {
    "spec/fusion.md": "# Fusion\n\n**FUSE-1** (MUST) Weights, $w \\ge 0$.\n*Source: paper.*\n\n```toml\na = 1\n```\n",
    "spec/divergences.md": "**DIV-B1** Something.\nMore.\n",
    "reference/branchgrpo/reference/fusion.py": 'def fuse():\n    """Fuse.\n\n    Clause: FUSE-1, DIV-B1.\n    """\n',
    "tests/test_fusion.py": '@clause("FUSE-1")\ndef test_fuse():\n    pass\n',
}
FAULTS = {
    "stated 2 times": ("spec/fusion.md", "*Source: paper.*", "*Source: paper.*\n\n**FUSE-1** (MAY) A.\n*Source: us.*"),
    "the prefix belongs to": ("spec/other.md", "", "**FUSE-2** (MAY) There.\n*Source: us.*\n"),
    "stated after": ("spec/fusion.md", "**FUSE-1**", "**FUSE-2** (MAY) First.\n*Source: us.*\n\n**FUSE-1**"),
    "not `**ID**": ("spec/fusion.md", "*Source: paper.*", ""),
    "not `**ID** (MUST|SHOULD|MAY)": ("spec/fusion.md", "(MUST)", "(SHALL)"),
    "is a MUST without a test": ("tests/test_fusion.py", '@clause("FUSE-1")\n', ""),
    "names no clause": ("tests/test_fusion.py", "FUSE-1", "FUSE-7"),
    "is no string literal": ("tests/test_fusion.py", '"FUSE-1"', '"FUSE-1", NAME'),
    "cites FUSE-3, which": ("reference/branchgrpo/reference/fusion.py", "FUSE-1, DIV-B1", "FUSE-1 … FUSE-3"),
    "cites DIV-B2, which": ("reference/branchgrpo/reference/fusion.py", "DIV-B1", "DIV-B2"),
    "cites FUZE-1, which": ("reference/branchgrpo/reference/fusion.py", "DIV-B1", "FUZE-1"),
    "function of reference without": ("reference/branchgrpo/reference/fusion.py", "Clause: FUSE-1, DIV-B1.", ""),
    "names FUSE-9, which": ("spec/divergences.md", "More.", "More: FUSE-9."),
    "DIV-B1: stated 2 times": ("spec/divergences.md", "More.", "More.\n\n**DIV-B1** Again.\nMore."),
    "link to gone.md": ("spec/fusion.md", "# Fusion", "# Fusion\n\n[there](gone.md)"),
    "a dollar that touches": ("spec/fusion.md", "$w \\ge 0$", "a$w \\ge 0$"),
    "an odd number of dollars": ("spec/fusion.md", "$w \\ge 0$", "$w \\ge 0"),
    "an escape that Markdown eats": ("spec/fusion.md", "$w \\ge 0$", "$w \\, \\ge 0$"),
}  # fmt: skip


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def test_a_small_checkout_without_fault_is_clean(tmp_path):
    write(tmp_path, GOOD)
    assert lint(tmp_path) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_the_linter_finds(fault, tmp_path):
    name, old, new = FAULTS[fault]
    text = GOOD.get(name, "")
    assert old in text
    write(tmp_path, GOOD | {name: text.replace(old, new, 1) if old else new})
    assert any(fault in found for found in lint(tmp_path)), lint(tmp_path)


def test_statements_may_hold_formulas_lists_and_several_paragraphs():
    text = "**NORM-1** (SHOULD) One:\n\n$$a$$\n\n* item\n\nTwo.\n*Source: a paper, Eq. 1 (DIV-B1).*\n\n## Next\n"
    (found,), faults = parse_chapter(text, "normalization")
    assert faults == []
    assert (found.id, found.level, found.prefix, found.number) == ("NORM-1", "SHOULD", "NORM", 1)
    assert found.text.endswith("Two.")
    assert found.source == "a paper, Eq. 1 (DIV-B1)"


def test_ranges_of_ids_are_spelled_out():
    assert cited("see PLAN-1 … PLAN-3, DIV-B13 and NORM-2, not HPS-v2.1") == [
        "PLAN-1", "PLAN-2", "PLAN-3", "DIV-B13", "NORM-2",
    ]  # fmt: skip


def test_the_marker_leaves_its_ids_and_refuses_what_is_no_id():
    @clause("PLAN-1")
    @clause("NORM-3", "NORM-4")
    def check():
        return 3

    assert check() == 3
    assert vars(check)["__clauses__"] == ("PLAN-1", "NORM-3", "NORM-4")
    for ids in ((), ("norm-3",), ("NORM3",)):
        with pytest.raises(BranchGRPOError, match="clause"):
            clause(*ids)


def test_the_linter_runs_as_a_module(monkeypatch, capsys):
    from branchgrpo.conformance import lint as module

    monkeypatch.setattr(module, "lint", lambda: ["a fault"])
    monkeypatch.setattr(sys, "argv", ["lint"])
    assert module.main() == 1
    assert capsys.readouterr().err == "a fault\n"
