"""``branchgrpo audit``: conformance, statistics and studies of an implementation, one report, one verdict."""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from branchgrpo.cli.errors import UsageError
from branchgrpo.cli.output import deliver
from branchgrpo.cli.parser import Parser

DESCRIPTION = """\
Audit an implementation of tree-structured GRPO, or a run's own plan, backbone, dtypes and noise source.

Written into DIR: report.html, one file with the verdict and its reasons, clause table and plots; audit.json, the same
as data; junit.xml. Stages that are done are kept in DIR/stages: an audit that was interrupted goes on where it
stopped, and one of unchanged inputs and sources answers at once.

Exit code 0: adopt, or adopt with the conditions that are printed. 1: reject. 2: bad input.
"""
EXAMPLES = """\
  branchgrpo audit                             the project's own batched implementation, minutes
  branchgrpo audit --impl mylab.grpo:Adapter   an implementation of yours (conformance/ADAPTERS.md)
  branchgrpo audit --config run.toml           a training run, as branchgrpo train reads it; with a table [audit], that
  branchgrpo train --preset NAME --print-config > run.toml   the file that serves both, with every option
  branchgrpo audit --mutants                   judge the judge again too, ten minutes more

the table [audit], every key with its default:
  preset = "branchgrpo"      a published method, as branchgrpo plan lists them
  plan = ""                  or a JSON file with a plan, as in a trace
  backbone = "gaussian"      gaussian, network, digits, or the folder of a diffusers pipeline
  dtype = "float32"          of the arithmetic: float64, float32, bfloat16, float16
  storage_dtype = "float32"  of stored states
  noise = "keyed"            keyed, or fast
  log_prob = ""              mean or sum; empty takes the preset's
  seed = 0
  iteration = 0
  prompts = 2
  latent = [4, 16, 16]
"""
COLOURS = {"adopt": "bold green", "adopt with conditions": "bold yellow", "reject": "bold red"}
GRADES = {"reject": ("against", "bold red"), "condition": ("condition", "yellow"), "note": ("note", "dim")}


def parser() -> Parser:
    """The arguments of ``branchgrpo audit``."""
    made = Parser("branchgrpo audit", DESCRIPTION, EXAMPLES)
    made.add_argument(
        "--impl",
        metavar="MODULE:OBJECT",
        default="optimized",
        help="implementation to audit; short names: optimized (default), reference, plain",
    )
    made.add_argument(
        "--config", metavar="FILE", type=Path, help="a training run's TOML file, or one with a table [audit]"
    )
    made.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("runs/audit"), help="where to write (default: runs/audit)"
    )
    made.add_argument("--device", default="cpu", help="torch device of the arrays (default: cpu)")
    made.add_argument("--xfails", metavar="FILE", type=Path, help="expected failures, lines CLAUSE  # reason")
    made.add_argument("--mutants", action="store_true", help="judge all mutants again instead of the stored matrix")
    made.add_json()
    return made


def require_extra() -> None:
    """Raise ``UsageError`` unless the packages that the audit needs are there."""
    missing = [name for name in ("scipy", "matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the audit needs {', '.join(missing)}: install branchgrpo with its extra [audit]")


def make_folder(path: Path) -> None:
    """Make the output folder, or say in one line why it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {str(path)!r}: {error.strerror}") from error


def make(args: argparse.Namespace) -> dict[str, Any]:
    """Audit what the arguments name, with progress on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from branchgrpo.conformance.audit.config import AuditConfig
    from branchgrpo.conformance.audit.context import Context
    from branchgrpo.conformance.audit.run import STAGES, Stage, run_audit
    from branchgrpo.conformance.audit.setting import make_setting, read_setting
    from branchgrpo.conformance.report import read_xfails
    from branchgrpo.conformance.subject_loading import load_subject

    setting = read_setting(args.config) if args.config is not None else make_setting(AuditConfig())
    subject = load_subject(args.impl, args.device)
    context = Context(subject, setting, read_xfails(args.xfails), args.mutants)
    make_folder(args.out)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("audit", total=len(STAGES))

        def progress(number: int, stage: Stage, stored: bool) -> None:
            bar.update(task, completed=number, description=stage.title + " (stored)" * stored)

        return run_audit(args.out, args.impl, context, progress)


def print_verdict(document: dict[str, Any], out: Path) -> None:
    """Print the verdict and its reasons."""
    from rich.console import Console

    console, verdict = Console(), document["verdict"]
    console.print(f"{document['implementation']}: ", end="", highlight=False, markup=False)
    console.print(verdict["decision"], style=COLOURS[verdict["decision"]], highlight=False)
    for found in verdict["reasons"]:
        word, style = GRADES[found["grade"]]
        console.print(f"  {word}: ", style=style, end="", highlight=False)
        console.print(found["text"], markup=False, highlight=False)
    console.print(f"report: {out / 'report.html'}", highlight=False, soft_wrap=True)


def main(argv: Sequence[str]) -> int:
    """Run ``branchgrpo audit``; exit code 1 if the verdict is ``reject``."""
    args = parser().parse(argv)
    require_extra()
    document = make(args)
    deliver(document, args.json, lambda: print_verdict(document, args.out))
    return 1 if document["verdict"]["decision"] == "reject" else 0
