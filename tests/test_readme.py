"""What the README shows is what happens."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from helpers_cli import ROOT, branchgrpo

from branchgrpo.cli.commands import COMMANDS

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"{room}/README.md" for room in (
    "reference", "optimized", "properties", "conformance", "tests"
))]  # fmt: skip


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_console_session():
    (session,) = blocks("console")
    command, *shown = session.rstrip().splitlines()
    words = command.removeprefix("$ .venv/bin/branchgrpo ").split()
    assert [line.rstrip() for line in branchgrpo(*words).stdout.rstrip().splitlines()] == shown


def test_python_example_trains_the_edges_that_are_counted():
    (example,) = blocks("python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})
    # Two prompts of 130 trained edges and 115 model calls each.
    assert re.fullmatch(r"260 edges through 230 model calls, J = [+-]\d\.\d{4}\n", printed.getvalue())


def test_commands_are_those_that_exist():
    table = re.findall(r"^\| `branchgrpo (\w+)` \| (.*) \|$", README, flags=re.MULTILINE)
    assert table == [(command.name, command.summary) for command in COMMANDS]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
        assert (ROOT / Path(page).parent / target).exists(), target


def test_it_opens_with_what_this_is_a_picture_and_two_commands():
    first, second = README.index("![The tree"), README.index("## Quick start")
    assert README.startswith("# branchgrpo\n\nTree-structured GRPO")
    assert 0 < first < second
    assert README.index("\n## ") == second - 1
