"""``branchgrpo mutants``: judge the judge."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from branchgrpo.cli.conformance import require_extra
from branchgrpo.cli.errors import unknown
from branchgrpo.cli.output import deliver
from branchgrpo.cli.parser import Parser

if TYPE_CHECKING:
    from branchgrpo.conformance.mutants.matrix import Matrix

DESCRIPTION = """\
Judge the conformance suite itself: implementations and traces that are right but for one fault.

Every mutant has to be killed by a check of the clause that it breaks, those that stand for faults of published code by
a check that sees nothing but the trace, and every check has to kill something. Exit code 1: one of these does not hold.
"""
EXAMPLES = """\
  branchgrpo mutants                       all of them, minutes
  branchgrpo mutants scaled_branch_noise   some
  branchgrpo mutants --json matrix.json    the whole kill matrix as data
"""


def print_matrix(matrix: "Matrix") -> None:
    """Print one row a mutant."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title="mutants", box=SIMPLE_HEAD)
    for column in ("mutant", "clause", "public code", "killed by"):
        table.add_column(column)
    for name, row in matrix.mutants.items():
        killers = row["killed_by"]
        assert isinstance(killers, list)
        mark = "" if row["killed_by_own_clause"] else "[bold red]LIVES[/] "
        table.add_row(name, str(row["clause"]), str(row["published"] or ""), mark + ", ".join(killers))
    Console().print(table)


def main(argv: Sequence[str]) -> int:
    """Run ``branchgrpo mutants``; exit code 1 if a mutant lives or a check is idle."""
    made = Parser("branchgrpo mutants", DESCRIPTION, EXAMPLES)
    made.add_argument("names", metavar="MUTANT", nargs="*", help="mutants to judge (default: all)")
    made.add_json()
    args = made.parse(argv)
    require_extra()
    from rich.console import Console

    from branchgrpo.conformance.mutants.base import MUTANTS
    from branchgrpo.conformance.mutants.matrix import kill_matrix

    for name in args.names:
        if name not in MUTANTS:
            raise unknown("mutant", name, MUTANTS, "see branchgrpo mutants --json")
    console = Console(stderr=True)
    with console.status("mutants") as status:
        matrix = kill_matrix(args.names or None, lambda name: status.update(f"mutant: {name}"))
    deliver({"mutants": matrix.mutants, "checks": matrix.checks}, args.json, lambda: print_matrix(matrix))
    faults = {
        "live": matrix.survivors(),
        "not killed from the trace": matrix.not_from_the_trace(),
        "idle checks": [] if args.names else matrix.idle(),
    }
    for what, names in faults.items():
        if names:
            console.print(f"{what}: {', '.join(names)}", style="bold red", highlight=False)
    return 1 if any(faults.values()) else 0
