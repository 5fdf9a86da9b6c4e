"""``branchgrpo train``: train a model with any of the methods, on one machine or many."""

import argparse
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branchgrpo.cli.errors import UsageError
from branchgrpo.cli.output import deliver
from branchgrpo.cli.parser import STANDARD_OUTPUT, Parser

if TYPE_CHECKING:
    from branchgrpo.training.config.schema import TrainConfig
    from branchgrpo.training.engine.loop import RunResult

DESCRIPTION = """\
Train a diffusion or flow model with BranchGRPO, G²RPO or any other method of `branchgrpo plan`.

A run is described by a TOML file, by a preset, or by a preset under a file; words option.name=value change single
options. --print-config prints every option with its value. An option that is unknown, or that nothing would use, is
refused.

Everything is written into run.folder: config.toml (every option as it was resolved), metrics.jsonl, checkpoints,
sample grids, the exported model. Ctrl-C saves a checkpoint and ends the run; --resume goes on from the newest one.

Several processes: start the same command through torchrun. Every process takes its share of an iteration's prompts,
and the update is that of one process with all of them.
"""
EXAMPLES = """\
  branchgrpo train --preset branchgrpo@digits           handwritten digits, seconds on a CPU
  branchgrpo train --preset g2rpo@tiny-flux             a tiny FLUX with random weights, to see the machinery
  branchgrpo train --preset branchgrpo --print-config   the published run; > run.toml keeps it to be changed
  branchgrpo train --config run.toml optimizer.learning_rate=3e-6 run.folder=runs/slow
  branchgrpo train --config runs/slow/config.toml --resume run.iterations=600
  torchrun --nproc_per_node=8 -m branchgrpo.cli.main train --config run.toml

a file (its tables: run, method, model, model.lora, rewards, data, rollout, update, optimizer, ema, monitors,
evaluation, checkpoint, logging; a table audit is for `branchgrpo audit`):
  base = "branchgrpo"              # optional: a preset, or another file, that this one changes

  [method]
  preset = "branchgrpo"
  settings = {steps = 16, splits = [0, 2, 5, 7]}

  [model]
  source = "models/FLUX.1-dev"     # a folder, a hub id, digits, or tiny-flux
  height = 512
  width = 512

  [data]
  prompts = "prompts.txt"          # or .jsonl, .csv, .parquet with a column

  [[rewards]]
  name = "hps_v2.1"

exit code: 0 finished; 1 stopped by a monitor, or by another process; 2 bad input; 130 interrupted and saved.
"""
OVERRIDE = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*=.*", re.DOTALL)
VALUED = ("--config", "--preset", "--checkpoint", "--require-audit")


def parser() -> Parser:
    """The arguments of ``branchgrpo train``."""
    made = Parser("branchgrpo train", DESCRIPTION, EXAMPLES)
    made.usage = "branchgrpo train [--config FILE] [--preset NAME] [options] [option.name=value …]"
    made.add_argument("--config", metavar="FILE", type=Path, help="TOML file of the run")
    made.add_argument("--preset", metavar="NAME", default="", help="start from a preset, see --list-presets")
    made.add_argument(
        "--resume", action="store_true", help="go on in run.folder, from its newest checkpoint; begin if none is there"
    )
    made.add_argument(
        "--checkpoint", metavar="FOLDER", type=Path, help="with --resume: go on from this checkpoint instead"
    )
    made.add_argument(
        "--require-audit",
        metavar="FILE",
        type=Path,
        help="refuse to start unless this audit.json passes for the same plan, backbone, dtypes and noise",
    )
    made.add_argument("--accept-conditions", action="store_true", help="with it: adopt with conditions passes, too")
    made.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    made.add_argument("--list-presets", action="store_true", help="list the presets and stop")
    made.add_json()
    return made


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are options of the command, and those that are ``option.name=value``."""
    options: list[str] = []
    overrides: list[str] = []
    for i, word in enumerate(argv):
        taken = i > 0 and argv[i - 1] in VALUED
        (overrides if OVERRIDE.fullmatch(word) and not taken else options).append(word)
    return options, overrides


def require_extra() -> None:
    """Raise ``UsageError`` unless the packages that every run needs are there."""
    missing = [name for name in ("accelerate", "pydantic", "tomlkit") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"training needs {', '.join(missing)}: install branchgrpo with its extra [training]")


def speaks() -> bool:
    """Whether this process prints: the first of its machine, as torchrun and accelerate number them."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def preset_rows() -> list[dict[str, str]]:
    """The presets, as JSON holds them."""
    from branchgrpo.reference.presets import preset
    from branchgrpo.training.config.names import methods, preset_document, twins

    rows = []
    for name in methods():
        source = str(preset_document(name)["model"]["source"])
        rows.append({"preset": name, "model": source, "settings": preset(name).source})
    return [*rows, *({"preset": f"{name}@{twin}", "model": twin} for name in methods() for twin in twins())]


def print_presets(rows: Sequence[dict[str, str]]) -> None:
    """Print the presets; twins in one line, for every method has all of them."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    twins = sorted({row["model"] for row in rows if "@" in row["preset"]})
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1), caption=f"every one at the size of a CPU: NAME@{', NAME@'.join(twins)}"
    )
    for title in ("preset", "model", "settings"):
        table.add_column(title, no_wrap=title == "preset")
    for row in rows:
        if "@" not in row["preset"]:
            table.add_row(row["preset"], row["model"].split("/")[-1], row["settings"])
    Console().print(table)


def configuration(args: argparse.Namespace, overrides: Sequence[str]) -> "TrainConfig":
    """The run's configuration.

    Raises:
        UsageError: nothing says what to train.
        InputError, OptionError: a file or an option that is not legal.
    """
    from branchgrpo.training.config.reading import read_config

    if args.config is None and not args.preset and not args.print_config:
        raise UsageError("nothing to train: give --config FILE or --preset NAME (see branchgrpo train --help)")
    if args.checkpoint is not None and not args.resume:
        raise UsageError("--checkpoint goes with --resume")
    return read_config(args.config, overrides, args.preset)


def result_row(result: "RunResult") -> dict[str, Any]:
    """How a run ended, as JSON holds it: numbers that are not finite are left out, for JSON has none."""
    metrics = {name: value for name, value in result.metrics.items() if abs(value) < float("inf")}
    return {
        "status": result.status,
        "folder": str(result.folder),
        "iterations": result.iterations,
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
        "export": None if result.export is None else str(result.export),
        "metrics": metrics,
    }


def print_result(row: dict[str, Any]) -> None:
    """Print how a run ended, and what to do next."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{row['status']} after {row['iterations']} iterations, in {row['folder']}", markup=False)
    for name in ("checkpoint", "export"):
        if row[name] is not None:
            console.print(f"{name}: {row[name]}", markup=False)
    rewards = {name: value for name, value in row["metrics"].items() if name.startswith("reward/")}
    for name in sorted(name for name in rewards if name.endswith("/mean")):
        console.print(f"{name.removesuffix('/mean')}: {rewards[name]:.4g}", markup=False)
    if row["status"] == "interrupted":
        console.print(f"go on with: branchgrpo train --config {row['folder']}/config.toml --resume", markup=False)
    else:
        console.print(f"report: branchgrpo report {row['folder']}", markup=False)


def prepare(args: argparse.Namespace, overrides: Sequence[str]) -> "TrainConfig":
    """Read the configuration and, where asked, the audit that must allow it."""
    if args.json not in (None, STANDARD_OUTPUT) and not Path(args.json).parent.is_dir():
        raise UsageError(f"cannot write {args.json!r}: its folder does not exist")  # before the run, not after it
    config = configuration(args, overrides)
    if args.require_audit is not None:
        from branchgrpo.training.audit_gate import check_audit

        check_audit(args.require_audit, config, conditions=args.accept_conditions)
    elif args.accept_conditions:
        raise UsageError("--accept-conditions goes with --require-audit")
    return config


def run(args: argparse.Namespace, config: "TrainConfig") -> int:
    """Train; exit code 1 if a monitor ended the run, 130 if it was interrupted.

    Raises:
        UsageError, BranchGRPOError: bad input.
    """
    from branchgrpo.cli.main import complain
    from branchgrpo.training.engine.interrupt import EXIT_CODE
    from branchgrpo.training.engine.loop import train
    from branchgrpo.training.monitors.limits import MonitorStop

    try:
        result = train(config, resume=args.checkpoint if args.checkpoint is not None else args.resume)
    except MonitorStop as stop:
        return complain(f"{stop} (in {config.run.folder})", code=1)
    if result.main:
        row = result_row(result)
        deliver(row, args.json, lambda: print_result(row))
    return EXIT_CODE if result.status == "interrupted" else 0


def show_config(args: argparse.Namespace, config: "TrainConfig") -> int:
    """Print every option of the run as TOML or JSON; JSON has no infinity, which is the text "inf" there."""
    from branchgrpo.training.config.reading import as_tables, as_toml

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(part) for key, part in value.items()}
        if isinstance(value, list):
            return [finite(part) for part in value]
        return str(value) if isinstance(value, float) and math.isinf(value) else value

    deliver(finite(as_tables(config)), args.json, lambda: print(as_toml(config), end=""))
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``branchgrpo train`` with the words that follow it."""
    from branchgrpo.reference.errors import BranchGRPOError

    words, overrides = split_overrides(argv)
    args = parser().parse(words)
    if args.list_presets:
        rows = preset_rows()
        deliver(rows, args.json, lambda: print_presets(rows))
        return 0
    require_extra()
    try:
        config = prepare(args, overrides)
    except (UsageError, BranchGRPOError):
        if speaks():
            raise
        return 2
    if args.print_config:
        return show_config(args, config)
    return run(args, config)
