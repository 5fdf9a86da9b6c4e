"""``branchgrpo demo``: three methods trained on handwritten digits, and a report."""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from branchgrpo.cli.errors import UsageError
from branchgrpo.cli.output import deliver
from branchgrpo.cli.parser import Parser, integer_from

DESCRIPTION = """\
Train a small flow-matching model of scikit-learn's handwritten digits with BranchGRPO, flat GRPO and G²RPO.

Every method gets the same number of denoiser calls, rollout and update together, and several seeds. The reward asks
for a stroke weight and for digits that a classifier reads; a judge of another model family, trained on other images,
tells whether they still are digits. The generator is trained first, from real images, if no earlier run has left it.

Written: DIR/report.html, one file with curves, samples and the drawn tree, and DIR/results.json.
"""
EXAMPLES = """\
  branchgrpo demo                    about five minutes on two cores, into runs/demo
  branchgrpo demo --check            the same, and exit code 1 unless every criterion holds
  branchgrpo demo --seeds 5          with more seeds
  branchgrpo demo --quick --json     some seconds, to see that everything works; its gains mean nothing
"""


def parser() -> Parser:
    """The arguments of ``branchgrpo demo``."""
    made = Parser("branchgrpo demo", DESCRIPTION, EXAMPLES)
    made.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("runs/demo"), help="where to write (default: runs/demo)"
    )
    size = made.add_mutually_exclusive_group()
    size.add_argument("--seeds", metavar="N", type=integer_from(1), default=3, help="runs a method (default: 3)")
    size.add_argument("--quick", action="store_true", help="one seed and a tiny budget, to try the machinery")
    made.add_argument("--workers", metavar="N", type=integer_from(1), help="processes (default: 2)")
    made.add_argument("--check", action="store_true", help="exit with 1 unless gains, judge, calls and time hold")
    made.add_json()
    return made


def require_extra() -> None:
    """Raise ``UsageError`` unless the packages of the ``digits`` extra are there."""
    missing = [name for name in ("sklearn", "matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the demo needs {', '.join(missing)}: install branchgrpo with its extra [digits]")


def run(args: argparse.Namespace) -> int:
    """Run the demo, show what came out, and check it where asked.

    Raises:
        UsageError: packages of the ``digits`` extra are missing.
    """
    require_extra()
    from rich.console import Console

    from branchgrpo.cli.demo_summary import print_criteria, print_summary
    from branchgrpo.training.demo.check import check
    from branchgrpo.training.demo.run import run_demo

    progress = Console(stderr=True)
    results = run_demo(args.out, seeds=args.seeds, quick=args.quick, workers=args.workers, console=progress)
    criteria = check(args.out / "results.json")
    deliver(results, args.json, lambda: print_summary(results))
    if not args.quick or args.check:
        print_criteria(criteria, progress)
    progress.print(f"report: {args.out / 'report.html'}", highlight=False, soft_wrap=True)
    return 0 if all(criterion.passed for criterion in criteria) or not args.check else 1


def main(argv: Sequence[str]) -> int:
    """Run ``branchgrpo demo`` with the words that follow it."""
    return run(parser().parse(argv))
