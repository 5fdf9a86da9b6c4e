"""``branchgrpo plan``: what a method samples and trains, counted and drawn from its plan alone."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from branchgrpo.cli.errors import UsageError, unknown
from branchgrpo.cli.output import deliver, write_file
from branchgrpo.cli.parser import Parser, integer_from

DESCRIPTION = """\
Count what a method samples and trains for one prompt. No model is needed: everything follows from the plan.

A tree's nodes are latent states. Siblings share their parent's denoiser call, so there are fewer calls than nodes.
Kept is what pruning leaves in the update; trained is the part of it whose noise can change the reward.
"""
EXAMPLES = """\
  branchgrpo plan                                         all presets side by side
  branchgrpo plan --preset branchgrpo-widpru              one of them
  branchgrpo plan --preset branchgrpo-deppru --iteration 90   its pruning window has moved three times
  branchgrpo plan --preset g2rpo --json                   as JSON on standard output
  branchgrpo plan --preset branchgrpo-mix --draw mix.svg  draw it
"""


def parser() -> Parser:
    """The arguments of ``branchgrpo plan``."""
    made = Parser("branchgrpo plan", DESCRIPTION, EXAMPLES)
    made.add_argument("--preset", metavar="NAME", help="the method; without it, all presets are listed")
    made.add_argument(
        "--iteration",
        metavar="N",
        type=integer_from(0),
        default=0,
        help="training iteration, which moves pruning and SDE windows (default: 0)",
    )
    made.add_argument("--draw", metavar="FILE.svg", type=Path, help="draw the tree into an SVG file")
    made.add_json()
    return made


def run(args: argparse.Namespace) -> int:
    """Count, and draw where asked.

    Raises:
        UsageError: an unknown preset, or a drawing without a preset.
    """
    from branchgrpo.cli.tables import print_all, print_one, row
    from branchgrpo.reference.counts import count
    from branchgrpo.reference.presets import PRESETS, preset

    if args.preset is None:
        if args.draw is not None:
            raise UsageError("--draw needs --preset NAME: which method shall be drawn?")
        results = [row(name, count(preset(name), args.iteration)) for name in PRESETS]
        deliver({"presets": results}, args.json, lambda: print_all(results))
        return 0
    if args.preset not in PRESETS:
        raise unknown("preset", args.preset, PRESETS, "`branchgrpo plan` lists them")
    method = preset(args.preset)
    result = row(method.name, count(method, args.iteration))
    if args.draw is not None:
        from branchgrpo.cli.draw import draw_method

        write_file(args.draw, draw_method(method, args.iteration))
    deliver(result, args.json, lambda: print_one(result, method, args.iteration))
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``branchgrpo plan`` with the words that follow it."""
    return run(parser().parse(argv))
