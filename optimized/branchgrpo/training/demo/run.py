"""The demo: pretrain, train three methods with several seeds, judge, report."""

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from branchgrpo.reference.counts import count
from branchgrpo.reference.errors import OptionError
from branchgrpo.training.demo.config import LABELS, STEPS, DemoConfig, demo_method, quick_config
from branchgrpo.training.demo.report import Pictures, render_report
from branchgrpo.training.demo.results import results_document
from branchgrpo.training.demo.train import Outcome, train
from branchgrpo.training.demo.workers import Pool, Task
from branchgrpo.training.digits import pretrained_classifier, pretrained_generator
from branchgrpo.training.digits_cache import write_atomically


class ProgressBars:
    """One bar a task that has begun, and one for everything; nothing is shown without a console."""

    def __init__(self, console: Console | None, total: int) -> None:
        columns = (TextColumn("{task.description:<24}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        self.progress = Progress(
            *columns, TimeElapsedColumn(), console=console or Console(quiet=True), disable=console is None
        )
        self.bars: dict[str, TaskID] = {}
        self.shares: dict[str, float] = {}
        self.overall = self.progress.add_task("the demo", total=float(total))

    def __call__(self, name: str, done: int, total: int) -> None:
        """Show that a task has done so much."""
        if name not in self.bars:
            self.bars[name] = self.progress.add_task(name, total=1.0)
        self.shares[name] = min(1.0, done / total)
        self.progress.update(self.bars[name], completed=self.shares[name], visible=self.shares[name] < 1.0)
        self.progress.update(self.overall, completed=sum(self.shares.values()))


def pretrain_generator(config: DemoConfig, on_progress: Any) -> None:
    """Make sure that the cache has the generator."""
    pretrained_generator(config.generator, on_progress)
    on_progress(1, 1)


def pretrain_classifier(config: DemoConfig, on_progress: Any) -> None:
    """Make sure that the cache has the reward's classifier."""
    pretrained_classifier(config.classifier, on_progress)
    on_progress(1, 1)


def pretraining_tasks(config: DemoConfig) -> list[Task]:
    """Generator and classifier, each trained if the cache does not have it."""
    return [
        Task("pretraining: generator", pretrain_generator, (config,)),
        Task("pretraining: classifier", pretrain_classifier, (config,)),
    ]


def training_tasks(config: DemoConfig) -> list[Task]:
    """One task a method and seed."""
    return [
        Task(f"{LABELS[name]}, seed {seed}", train, (name, seed, config))
        for seed in range(config.seeds)
        for name in LABELS
    ]


@dataclass(frozen=True, eq=False)
class Timed:
    """What the runs gave, and the seconds that each phase took."""

    outcomes: list[Outcome]
    seconds: dict[str, float]


def processor_seconds() -> float:
    """Processor time of this process and of its workers that have ended (POSIX counts them)."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run_everything(config: DemoConfig, console: Console | None) -> Timed:
    """Pretrain, then train everything, with progress bars."""
    start, used = time.perf_counter(), processor_seconds()
    first, second = pretraining_tasks(config), training_tasks(config)
    bars = ProgressBars(console, len(first) + len(second))
    with bars.progress, Pool(config.workers) as pool:
        pool.run(first, bars)
        middle = time.perf_counter()
        outcomes = pool.run(second, bars)
    end = time.perf_counter()
    seconds = {"pretraining": middle - start, "runs": end - middle, "total": end - start}
    if os.name == "posix":
        seconds["processor"] = processor_seconds() - used
    return Timed(outcomes, seconds)


def method_facts(name: str, config: DemoConfig) -> dict[str, Any]:
    """A method's label, settings and counts a prompt."""
    counts = count(demo_method(name))
    return {
        "label": LABELS[name],
        **asdict(config.tuning[name]),
        "counts": {**asdict(counts), "nfe_nodes": counts.nfe_nodes, "nfe_calls": counts.nfe_calls},
    }


def pictures(outcomes: list[Outcome]) -> Pictures:
    """The report's images: those of the first seed."""
    first = {outcome.run.method: outcome for outcome in outcomes if outcome.run.seed == 0}
    tree = first["branchgrpo"]
    return Pictures(tree.before, {name: first[name].after for name in LABELS}, tree.tree)


def demo_config(seeds: int, quick: bool, workers: int | None) -> DemoConfig:
    """The configuration of a call of ``run_demo``."""
    base = quick_config() if quick else DemoConfig(seeds=seeds)
    return base if workers is None else replace(base, workers=workers)


def run_demo(
    out: Path,
    *,
    seeds: int = 3,
    quick: bool = False,
    workers: int | None = None,
    console: Console | None = None,
    config: DemoConfig | None = None,
) -> dict[str, Any]:
    """Train the digits model with three methods and write ``report.html`` and ``results.json``.

    Args:
        out: directory for the two files; made if missing.
        seeds: runs a method.
        quick: a run of seconds with one seed, for tests; its gains mean nothing.
        workers: processes; None takes the configuration's.
        console: where to show progress; None shows nothing.
        config: takes the place of ``seeds``, ``quick`` and ``workers``.

    Returns:
        The content of ``results.json``.

    Raises:
        OptionError: an ``out`` that is a file, or an option out of range.
    """
    if out.exists() and not out.is_dir():
        raise OptionError("out", str(out), "a directory, or a path where one can be made")
    config = config or demo_config(seeds, quick, workers)
    timed = run_everything(config, console)
    environment = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    results = results_document(
        [outcome.run for outcome in timed.outcomes],
        {name: method_facts(name, config) for name in LABELS},
        {**asdict(config), "steps": STEPS},
        {"seconds": timed.seconds, "environment": environment},
    )
    write_atomically(out / "results.json", json.dumps(results, indent=1).encode())
    write_atomically(out / "report.html", render_report(results, pictures(timed.outcomes)).encode())
    return results
