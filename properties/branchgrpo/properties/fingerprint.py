"""A hash of the statistical checks' code, by which a stored calibration says which code it calibrated."""

import ast
import hashlib
from pathlib import Path

ROOT = Path(__file__).parent
PARTS = (
    "budget.py",
    "linear.py",
    "samples.py",
    "statistics/*.py",
    "checks/noise.py",
    "checks/leaves.py",
    "checks/estimators.py",
    "checks/singular.py",
)
"""Files whose code decides what the statistical checks compute."""


def without_docstrings(tree: ast.Module) -> ast.Module:
    """The module with every docstring removed, so that words and layout leave the hash alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [
                part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            ]
    return tree


def source_hash() -> str:
    """SHA-256 over the syntax trees of the checks' files."""
    digest = hashlib.sha256()
    for part in PARTS:
        for path in sorted(ROOT.glob(part)):
            tree = without_docstrings(ast.parse(path.read_text(encoding="utf-8")))
            digest.update(f"{path.relative_to(ROOT).as_posix()}\n{ast.dump(tree)}\n".encode())
    return digest.hexdigest()
