"""``branchgrpo report``: a run, finished or not, as one HTML file."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from branchgrpo.cli.errors import UsageError
from branchgrpo.cli.output import deliver, write_file
from branchgrpo.cli.parser import Parser

if TYPE_CHECKING:
    from branchgrpo.training.logs.report.summary import Summary

DESCRIPTION = """\
Make one self-contained HTML file of a run: how it ended, curves of rewards, monitors with their thresholds, warnings,
spread by depth, samples over time, where the time went, configuration and versions. The run may still be going on.
"""
EXAMPLES = """\
  branchgrpo report runs/train                       writes runs/train/report.html
  branchgrpo report runs/train --output today.html   elsewhere
  branchgrpo report runs/train --json                and what it comes to, for a program
"""


def build_parser() -> Parser:
    """The options of the subcommand."""
    parser = Parser("branchgrpo report", DESCRIPTION, EXAMPLES)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("--output", metavar="FILE", type=Path, help="where to write (default: RUN/report.html)")
    parser.add_json()
    return parser


def require_extra() -> None:
    """Raise ``UsageError`` unless the packages that draw the report are there."""
    missing = [name for name in ("matplotlib", "jinja2", "PIL") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the report needs {', '.join(missing)}: install branchgrpo with its extra [training]")


def main(argv: Sequence[str]) -> int:
    """Write the report, and print or write what it comes to."""
    args = build_parser().parse(argv)
    require_extra()
    from branchgrpo.training.logs.report.page import make_report

    page, summary = make_report(args.run)
    output: Path = args.output or args.run / "report.html"
    write_file(output, page)
    deliver({**summary.as_dict(), "report": str(output)}, args.json, lambda: show(summary, output))
    return 0


def show(summary: "Summary", output: Path) -> None:
    """Print a few lines for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from branchgrpo.training.logs.report.page import STATUS, significant

    console = Console()
    planned = "" if summary.planned is None else f" of {summary.planned}"
    console.print(Text(f"{STATUS.get(summary.status, summary.status)}, {summary.done}{planned} iterations"))
    if summary.text:
        console.print(Text(summary.text), soft_wrap=True)
    if summary.changes:
        table = Table("reward", "role", "first", "last", "change")
        for c in summary.changes:
            error = "" if c.error is None else f" ± {c.error:.2g}"
            change = "–" if c.rise is None else f"{c.rise:+.4g}{error}"
            role = "held out" if c.held_out else "trained"
            table.add_row(Text(c.name), role, significant(c.first), significant(c.last), change)
        console.print(table)
    for entry in summary.warned:
        console.print(Text(f"{entry.level} ({len(entry.iterations)}×): {entry.text}"), soft_wrap=True)
    console.print(f"report: {output}", highlight=False, soft_wrap=True, markup=False)
