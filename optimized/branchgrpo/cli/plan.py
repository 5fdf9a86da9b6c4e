"""``branchgrpo plan``: what a method samples and trains, counted and drawn from its plan alone."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branchgrpo.cli.errors import UsageError, unknown
from branchgrpo.cli.output import deliver, write_file
from branchgrpo.cli.parser import Parser, integer_from
from branchgrpo.cli.plan_options import PLANNER, add_options, setup_of

if TYPE_CHECKING:
    from branchgrpo.reference.method import Method
    from branchgrpo.training.planner.setup import Setup

DESCRIPTION = """\
Count what a method samples and trains for one prompt. No model is needed: everything follows from the plan.
With --backbone also what an iteration costs: arithmetic, memory, and time against flat GRPO.

A tree's nodes are latent states. Siblings share their parent's denoiser call, so there are fewer calls than nodes.
Kept is what pruning leaves in the update; trained is the part of it whose noise can change the reward.
"""
EXAMPLES = """\
  branchgrpo plan                                         all presets side by side
  branchgrpo plan --preset branchgrpo-widpru              one of them
  branchgrpo plan --preset branchgrpo-deppru --iteration 90   its pruning window has moved three times
  branchgrpo plan --preset g2rpo --json                   as JSON on standard output
  branchgrpo plan --preset branchgrpo-mix --draw mix.svg  draw it
  branchgrpo plan --preset branchgrpo --backbone flux.1-dev --height 720 --width 720 --gpus 8 --lora 32
                                                          what an iteration costs
  branchgrpo plan --backbone wan2.1-1.3b --height 480 --width 832 --frames 81 --gradient-checkpointing
                                                          all presets side by side
  branchgrpo plan --config run.toml --gpus 8              a run of yours

"""


def parser() -> Parser:
    """The arguments of ``branchgrpo plan``."""
    made = Parser("branchgrpo plan", DESCRIPTION, EXAMPLES + PLANNER)
    made.add_argument("--preset", metavar="NAME", help="the method; without it, all presets are listed")
    made.add_argument(
        "--iteration",
        metavar="N",
        type=integer_from(0),
        default=0,
        help="training iteration, which moves pruning and SDE windows (default: 0)",
    )
    made.add_argument("--draw", metavar="FILE.svg", type=Path, help="draw the tree into an SVG file")
    add_options(made)
    made.add_json()
    return made


def run(args: argparse.Namespace) -> int:
    """Count, forecast and draw, as asked.

    Raises:
        UsageError: an unknown preset, a drawing without a preset, or options of the planner without a backbone.
        OptionError, InputError: a setup that is not legal.
    """
    from branchgrpo.reference.presets import PRESETS, preset

    setup, method = setup_of(args)
    if args.preset is None and method is None:
        if args.draw is not None:
            raise UsageError("--draw needs --preset NAME: which method shall be drawn?")
        return run_all(args, setup)
    if method is None:
        if args.preset not in PRESETS:
            raise unknown("preset", args.preset, PRESETS, "`branchgrpo plan` lists them")
        method = preset(args.preset)
    return run_one(args, setup, method)


def run_one(args: argparse.Namespace, setup: "Setup | None", method: "Method") -> int:
    """One method: its counts, its forecast and its drawing."""
    from branchgrpo.cli.planner_tables import print_forecast
    from branchgrpo.cli.tables import print_one, row
    from branchgrpo.reference.counts import count

    result: dict[str, Any] = dict(row(method.name, count(method, args.iteration)))
    if setup is not None:
        from branchgrpo.training.planner.forecast import forecast

        result["planner"] = forecast(method, setup, args.iteration)
    if args.draw is not None:
        from branchgrpo.cli.draw import draw_method

        write_file(args.draw, draw_method(method, args.iteration))

    def table() -> None:
        print_one(result, method, args.iteration)
        if setup is not None:
            print_forecast(result["planner"])

    deliver(result, args.json, table)
    return 0


def run_all(args: argparse.Namespace, setup: "Setup | None") -> int:
    """All presets side by side."""
    from branchgrpo.cli.planner_tables import print_forecasts
    from branchgrpo.cli.tables import print_all, row
    from branchgrpo.reference.counts import count
    from branchgrpo.reference.presets import PRESETS, preset

    results: list[dict[str, Any]] = [dict(row(name, count(preset(name), args.iteration))) for name in PRESETS]
    if setup is not None:
        from branchgrpo.training.planner.forecast import forecast

        for result in results:
            result["planner"] = forecast(preset(result["preset"]), setup, args.iteration)

    def table() -> None:
        if setup is None:
            print_all(results)
        else:
            print_forecasts([(result["preset"], result["planner"]) for result in results])

    deliver({"presets": results}, args.json, table)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``branchgrpo plan`` with the words that follow it."""
    return run(parser().parse(argv))
