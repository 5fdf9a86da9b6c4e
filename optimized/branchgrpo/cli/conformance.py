"""``branchgrpo conformance``: judge an implementation, or the trace of one, clause by clause."""

import argparse
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from branchgrpo.cli.errors import UsageError
from branchgrpo.cli.output import deliver, write_file
from branchgrpo.cli.parser import Parser

if TYPE_CHECKING:
    from branchgrpo.conformance.checks.base import Subject
    from branchgrpo.conformance.device_table import DeviceTable
    from branchgrpo.conformance.report import Report

DESCRIPTION = """\
Judge an implementation of tree-structured GRPO clause by clause of the specification.

The implementation is driven through the operations of the Implementation protocol on small cases, and everything it
answers is checked: against closed forms, against exact laws, and against what its own arrays imply. A trace file
(spec/trace.md) of any program, in any language, can be judged in its place. An operation that is missing, or an array
that was not dumped, makes a clause unsupported, never passed. Exit code 1: a MUST failed; 2: no MUST could be judged.
conformance/ADAPTERS.md of the project says how to wrap code of yours.
"""
EXAMPLES = """\
  branchgrpo conformance                                  the project's own batched implementation
  branchgrpo conformance --impl mylab.grpo:Adapter        an implementation of yours
  branchgrpo conformance --vectors                        and by the stored test vectors
  branchgrpo conformance --trace run.safetensors          what a run has dumped
  branchgrpo conformance --device cuda --table            errors on a device in every precision, with their bounds
  branchgrpo conformance --xfails known.txt --junit r.xml expected failures, and a report for a build server
"""
DEFAULT = "optimized"
"""Judged where nothing is named; no default of the parser, which could not tell it from the same word typed."""
COLOURS = {
    "passed": "green",
    "failed": "bold red",
    "unsupported": "yellow",
    "not judged": "bold yellow",
    "xfailed": "magenta",
}


def parser() -> Parser:
    """The arguments of ``branchgrpo conformance``."""
    made = Parser("branchgrpo conformance", DESCRIPTION, EXAMPLES)
    subject = made.add_mutually_exclusive_group()
    subject.add_argument(
        "--impl",
        metavar="MODULE:OBJECT",
        help="implementation to judge; short names: optimized (default), reference, plain",
    )
    subject.add_argument(
        "--trace", metavar="FILE", type=Path, help="judge a trace, FILE.safetensors with its JSON beside it"
    )
    made.add_argument("--vectors", action="store_true", help="put the stored test vectors (spec/vectors) to it as well")
    made.add_argument("--device", default="cpu", help="torch device of the arrays (default: cpu)")
    made.add_argument(
        "--table",
        action="store_true",
        help="instead of clauses, compare it on the device with the reference on the CPU: float64, float32, TF32, "
        "a bf16 denoiser, compiled; and the bits of two runs, and of one in poisoned memory",
    )
    made.add_argument("--xfails", metavar="FILE", type=Path, help="expected failures, lines CLAUSE  # reason")
    made.add_argument("--junit", metavar="FILE", type=Path, help="also write JUnit XML")
    made.add_json()
    return made


def require_extra() -> None:
    """Raise ``UsageError`` unless the packages of the ``audit`` extra are there."""
    if importlib.util.find_spec("scipy") is None:
        raise UsageError("conformance needs scipy: install branchgrpo with its extra [audit]")


def make(args: argparse.Namespace) -> "Report":
    """Judge what the arguments name, with progress on standard error."""
    from rich.console import Console

    from branchgrpo.conformance.judge import judge
    from branchgrpo.conformance.report import make_report, read_xfails
    from branchgrpo.conformance.runner import run_trace_file
    from branchgrpo.conformance.subject_loading import load_subject, suspicious_names

    expected = read_xfails(args.xfails)
    if args.trace is not None and args.vectors:
        raise UsageError("--vectors goes with --impl: a trace answers no questions")
    if args.trace is not None:
        return make_report(str(args.trace), run_trace_file(args.trace), expected)
    subject = load_subject(args.impl or DEFAULT, args.device)
    for line in suspicious_names(subject.implementation):
        print(f"branchgrpo: warning: {line}", file=sys.stderr)
    with Console(stderr=True).status("conformance") as status:
        report = judge(subject, expected, lambda name: status.update(f"conformance: {name}"))
        if not args.vectors:
            return report
        status.update("conformance: vectors")
        return with_vectors(report, subject, expected)


def with_vectors(report: "Report", subject: "Subject", expected: Mapping[str, str]) -> "Report":
    """The report, and the test vectors that the implementation has an operation for."""
    from dataclasses import replace

    from branchgrpo.conformance.report import make_report
    from branchgrpo.conformance.vectors.verify import verify

    results = verify(subject.implementation, device=str(subject.device))
    found = [replace(r, check=f"vector_{r.check}") for r in results if r.status != "unsupported"]
    return make_report(report.implementation, [*report.results, *found], expected)


COUNTED = ("case", "vector")
"""What checks are of which there are many; their names begin with it."""


def check_names(checks: Sequence[str]) -> list[str]:
    """The names of a clause's checks in words; the cases that were driven and the vectors are counted, not listed."""
    counts = {kind: sum(name.startswith(f"{kind}_") for name in checks) for kind in COUNTED}
    names = [name.replace("_", " ") for name in checks if not name.startswith(tuple(f"{kind}_" for kind in COUNTED))]
    return [*names, *(f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count)]


def print_table(report: "Report") -> None:
    """Print one row a clause, a line for every fault, and the reasons of what was not judged."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from branchgrpo.conformance.report import NOT_JUDGED

    console, summaries = Console(), {clause.id: clause.summary for clause in report.clauses}
    reasons = report.reasons()
    lost = {clause for reason, clauses in reasons.items() if reason.startswith(NOT_JUDGED) for clause in clauses}
    counts: dict[str, int] = {}
    table = Table(title=f"conformance of {report.implementation}", box=SIMPLE_HEAD)
    for column in ("clause", "level", "status", "checks"):
        table.add_column(column, no_wrap=column != "checks")
    for clause, row in report.data()["clauses"].items():
        names = ", ".join(check_names([check["check"] for check in row["checks"]]))
        status = NOT_JUDGED if row["status"] == "unsupported" and clause in lost else row["status"]
        counts[status] = counts.get(status, 0) + 1
        table.add_row(clause, row["level"], f"[{COLOURS[status]}]{status}[/]", names)
    console.print(table)
    for result, checks in report.faults():
        many = f" and {len(checks) - 1} more" if len(checks) > 1 else ""
        console.print(f"[{COLOURS[result.status]}]{result.status}[/] {result.clause} {result.check}{many}: ", end="")
        console.print(result.detail, markup=False, highlight=False)
        console.print(f"  {summaries.get(result.clause, '')}", markup=False, highlight=False, style="dim")
    for reason, clauses in reasons.items():
        console.print(NOT_JUDGED if reason.startswith(NOT_JUDGED) else "unsupported", style="yellow", end=" ")
        console.print(f"{', '.join(clauses)}: {reason.removeprefix(f'{NOT_JUDGED}: ')}", markup=False, highlight=False)
    console.print(", ".join(f"{counts[status]} {status}" for status in COLOURS if status in counts))


def make_device_table(args: argparse.Namespace) -> "DeviceTable":
    """The device table of what the arguments name, with progress on standard error."""
    from rich.console import Console

    from branchgrpo.conformance.device_table import device_table
    from branchgrpo.conformance.subject_loading import load_subject

    clausewise = {"--trace": args.trace, "--vectors": args.vectors, "--xfails": args.xfails, "--junit": args.junit}
    if strange := [option for option, value in clausewise.items() if value]:
        raise UsageError(f"{strange[0]} does not go with --table, which judges no clauses")
    subject = load_subject(args.impl or DEFAULT, args.device)
    with Console(stderr=True).status("device table") as status:
        return device_table(subject, progress=lambda name: status.update(f"device table: {name}"))


def print_device_table(made: "DeviceTable") -> None:
    """Print one row a variant and quantity, and what is wrong or missing below."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{made.implementation} on {made.device} against the reference in float64", box=SIMPLE_HEAD)
    for column in ("variant", "quantity", "error", "bound", "status"):
        table.add_column(column, no_wrap=True)
    details: dict[str, None] = {}
    for row in made.rows:
        numbers = ["" if number is None else f"{number:.2g}" for number in (row.error, row.bound)]
        table.add_row(row.variant, row.quantity, *numbers, f"[{COLOURS[row.status]}]{row.status}[/]")
        if row.detail:
            where = row.variant if row.status == "unsupported" else f"{row.variant}, {row.quantity}"
            details[f"{row.status} {where}: {row.detail}"] = None
    console.print(table)
    for line in details:
        console.print(line, markup=False, highlight=False)
    console.print(", ".join(f"{made.count(s)} {s}" for s in ("passed", "failed", "unsupported") if made.count(s)))


def device_main(args: argparse.Namespace) -> int:
    """Run ``branchgrpo conformance --table``; exit code 1 if a row failed."""
    made = make_device_table(args)
    deliver(made.data(), args.json, lambda: print_device_table(made))
    if made.count("unsupported") == len(made.rows):
        raise UsageError(f"nothing of {made.implementation} could be compared: {made.rows[0].detail}")
    return 1 if made.count("failed") else 0


def main(argv: Sequence[str]) -> int:
    """Run ``branchgrpo conformance``; exit code 1 if a MUST clause failed."""
    args = parser().parse(argv)
    require_extra()
    if args.table:
        return device_main(args)
    report = make(args)
    if args.junit is not None:
        from branchgrpo.conformance.junit import junit

        write_file(args.junit, junit(report))
    deliver(report.data(), args.json, lambda: print_table(report))
    if not report.judged_musts():
        raise UsageError(f"no MUST clause of {report.implementation} could be judged: see the reasons, or --json")
    return 1 if report.failed_musts() else 0
