"""The demo's results as a table, and its criteria as lines."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from branchgrpo.training.demo.check import describe
from branchgrpo.training.demo.results import Criterion


def with_spread(mean: float, sd: float | None) -> str:
    """A mean with the standard deviation over the seeds; of one seed there is none."""
    return f"{mean:+.3f}" if sd is None else f"{mean:+.3f} ± {sd:.3f}"


def print_summary(results: Mapping[str, Any]) -> None:
    """Print what each method gained, with which calls and time, and what the judge says."""
    methods = results["methods"].values()
    runs = max(len(method["runs"]) for method in methods)
    title = f"digits, {runs} seed{'s' if runs > 1 else ''} a method, ± over seeds"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0))
    table.add_column("method", no_wrap=True)
    for heading in ("reward\nbefore", "reward\nafter", "gain", "judge\nbefore", "judge\nafter", "calls", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for method in methods:
        table.add_row(
            method["label"],
            f"{method['mean_base_reward']:.3f}",
            f"{method['mean_final_reward']:.3f}",
            with_spread(method["mean_gain"], method["sd_gain"]),
            f"{method['mean_judge_base']:.1%}",
            f"{method['mean_judge_final']:.1%}",
            f"{sum(run['calls'] for run in method['runs']) / len(method['runs']):,.0f}",
            f"{method['mean_seconds']:.0f}",
        )
    Console().print(table)


def print_criteria(criteria: Sequence[Criterion], console: Console) -> None:
    """Print one line a criterion: whether it holds, what was measured, what is required."""
    for criterion in criteria:
        style = "green" if criterion.passed else "bold red"
        console.print(describe(criterion), style=style, highlight=False, markup=False, soft_wrap=True)
