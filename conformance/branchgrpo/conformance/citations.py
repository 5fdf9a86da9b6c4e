"""Where code cites clauses: docstrings of functions and classes, and the markers of tests. Nothing is imported."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from branchgrpo.conformance.clauses import ROOT, cited

ROOMS = {
    "reference": "reference/branchgrpo/reference",
    "oracle": "reference/branchgrpo/oracle",
    "optimized": "optimized/branchgrpo",
    "properties": "properties",
    "conformance": "conformance",
    "tests": "tests",
}
"""Room → its folder. ``optimized`` holds what users run: the batched path, models, rewards, training, command line."""

FORMULA_ROOMS = ("reference", "oracle")
MARKED_ROOMS = ("properties", "conformance", "tests")


@dataclass(frozen=True)
class Definition:
    """A function, method or class, with the clauses that its docstring cites and those that mark it."""

    room: str
    path: str
    name: str
    is_function: bool
    docstring: str
    cites: tuple[str, ...]
    marks: tuple[str, ...]
    bad_marks: tuple[str, ...]

    @property
    def is_public_function(self) -> bool:
        """A module-level function whose name has no leading underscore."""
        return self.is_function and "." not in self.name and not self.name.startswith("_")

    @property
    def label(self) -> str:
        """Path and name, as pytest writes a test's id."""
        return f"{self.path}::{self.name.replace('.', '::')}"


def marker_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> tuple[list[str], list[str]]:
    """Ids of the ``clause`` markers of a definition, and the arguments that are no string literals."""
    ids: list[str] = []
    bad: list[str] = []
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).split(".")[-1] == "clause":
            for argument in [*decorator.args, *(k.value for k in decorator.keywords)]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    ids.append(argument.value)
                else:
                    bad.append(ast.unparse(argument))
    return ids, bad


def walk(tree: ast.Module, room: str, path: str) -> Iterator[Definition]:
    """Every function, method and class of a module; attribute docstrings belong to their class or module."""
    stack: list[tuple[ast.AST, str]] = [(tree, "")]
    while stack:
        node, prefix = stack.pop()
        strings = [
            s.value.value
            for s in ast.iter_child_nodes(node)
            if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) and isinstance(s.value.value, str)
        ]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}"
            ids, bad = marker_arguments(node)
            text = "\n".join(strings)
            yield Definition(
                room, path, name, not isinstance(node, ast.ClassDef), text, tuple(cited(text)), tuple(ids), tuple(bad)
            )
            prefix = f"{name}."
        elif isinstance(node, ast.Module):
            text = "\n".join(strings)
            yield Definition(room, path, "<module>", False, text, tuple(cited(text)), (), ())
        children = [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.stmt)]
        stack.extend((child, prefix) for child in reversed(children))


@cache
def definitions(root: Path = ROOT) -> tuple[Definition, ...]:
    """All definitions of all rooms, by path and then in the order of the file; read once in a process."""
    found: list[Definition] = []
    for room, folder in ROOMS.items():
        for file in sorted((root / folder).rglob("*.py")):
            source = file.read_text(encoding="utf-8")
            found.extend(walk(ast.parse(source), room, file.relative_to(root).as_posix()))
    return tuple(found)
