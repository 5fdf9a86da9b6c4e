"""The audit's report: one HTML file that needs nothing else."""

import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, select_autoescape

from branchgrpo.conformance.audit import figures
from branchgrpo.conformance.audit.context import Data
from branchgrpo.conformance.clauses import load_clauses
from branchgrpo.conformance.report import Report

TEMPLATE = Path(__file__).with_name("report.html.j2")
PLOTS: dict[str, tuple[str, Callable[[Data], str]]] = {
    "noise": ("plots", figures.qq_svg),
    "siblings": ("points", figures.siblings_svg),
    "concentration": ("curves", figures.concentration_svg),
    "estimator": ("rows", figures.estimator_svg),
    "pruning": ("rows", figures.pruning_svg),
    "precision": ("rows", figures.precision_svg),
    "mutants": ("checks", figures.kills_svg),
}
"""Section → the key that its data must have, not empty, and what draws it."""


def number(value: Any, digits: int = 3) -> str:
    """A number for people; a dash where there is none."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


SYMBOLS = {
    "ge": "≥", "le": "≤", "ne": "≠", "in": "∈", "infty": "∞", "pm": "±", "cdot": "·", "ldots": "…", "sum": "Σ",
    "sigma": "σ", "eta": "η", "beta": "β", "lambda": "λ", "Lambda": "Λ", "Delta": "Δ", "delta": "δ", "tau": "τ",
    "mu": "μ", "xi": "ξ", "rho": "ρ", "epsilon": "ε", "varepsilon": "ε", "theta": "θ", "pi": "π", "ell": "ℓ",
    "log": "log", "exp": "exp", "mid": "|", "sqrt": "√", "partial": "∂", "lbrace": "{", "rbrace": "}", "lfloor": "⌊",
    "rfloor": "⌋", "lVert": "‖", "rVert": "‖", "times": "×", "to": "→", "min": "min", "max": "max", "sim": "~",
}  # fmt: skip
"""What a page that typesets no mathematics shows for TeX's names."""


def plain(text: str) -> str:
    """A clause's first sentence without the marks of Markdown and TeX."""
    text = re.sub(r"\\(?:mathrm|text|bar|hat|big|Big|left|right)\b ?", "", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda found: SYMBOLS.get(found[1], found[1]), text)
    return re.sub(r"[$`*]|(?<=\w)[{}]|\{(?=\w)|(?<=\w)\}", "", text)


def render_report(document: Data, checks: Report) -> str:
    """The report as HTML.

    Args:
        document: of ``audit.json``.
        checks: all checks, statistics among them, by clause.
    """
    stages = document["stages"]
    drawn = {name: draw(stages[name]) if stages[name].get(key) else "" for name, (key, draw) in PLOTS.items()}
    summaries = {clause.id: clause for clause in load_clauses()[0]}
    found = checks.data()["clauses"]
    counts = {
        status: sum(row["status"] == status for row in found.values())
        for status in ("passed", "failed", "unsupported", "xfailed")
    }
    environment = Environment(
        undefined=StrictUndefined, autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    environment.filters["plain"] = plain
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        document=document,
        stages=stages,
        verdict=document["verdict"],
        figures=drawn,
        clauses=found,
        counts=counts,
        summaries=summaries,
        version=version("branchgrpo"),
        seconds=sum(stage.get("seconds", 0) for stage in stages.values()),
    )
