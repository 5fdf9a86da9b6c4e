"""Counts of presets as JSON data and as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from branchgrpo.reference.counts import Counts
from branchgrpo.reference.method import Method

Row = dict[str, str | int | float]

MEANING = {
    "steps": "denoising steps of the schedule",
    "leaves": "samples that are rewarded",
    "nodes": "latent states, initial noise included",
    "edges": "denoising transitions",
    "denoiser_calls": "model calls, one a parent",
    "nfe_nodes": "nodes a leaf",
    "nfe_calls": "denoiser calls a leaf",
    "kept_edges": "edges after pruning",
    "kept_parents": "model calls under kept edges",
    "trained_edges": "kept edges whose noise can change the reward",
    "trained_parents": "model calls that the update repeats with gradients",
    "calls_public": "model calls of the public code",
    "calls_shared": "model calls when equal inputs are called once",
    "calls_shared_stopped_anchor": "and the anchor stops at its last perturbed step",
}
OVERVIEW = {
    "steps": "steps",
    "leaves": "leaves",
    "nodes": "nodes",
    "denoiser_calls": "calls",
    "nfe_nodes": "nodes\na leaf",
    "nfe_calls": "calls\na leaf",
    "kept_edges": "edges\nkept",
    "trained_edges": "edges\ntrained",
}


def row(name: str, counts: Counts) -> Row:
    """The result of one preset, as JSON holds it: counts that only plan families have are left out elsewhere."""
    return {"preset": name} | {key: getattr(counts, key) for key in MEANING if getattr(counts, key) is not None}


def shown(value: str | int | float) -> str:
    """A count as the tables print it: 1,216 or 12.6875."""
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def print_one(result: Mapping[str, Any], method: Method, iteration: int) -> None:
    """Print the counts of one preset with their meanings."""
    table = Table(title=f"{method.name}, one prompt, iteration {iteration}", caption=f"settings: {method.source}")
    table.add_column("count")
    table.add_column("value", justify="right", style="bold")
    table.add_column("meaning")
    for key, meaning in MEANING.items():
        if key in result:
            table.add_row(key, shown(result[key]), meaning)
    Console().print(table)


def print_all(results: Sequence[Mapping[str, Any]]) -> None:
    """Print all presets side by side, in 80 columns."""
    table = Table(
        title="presets, one prompt",
        caption="branchgrpo plan --preset NAME explains every count of one",
        box=SIMPLE_HEAD,
        padding=(0, 0),
    )
    table.add_column("preset", no_wrap=True)
    for title in OVERVIEW.values():
        table.add_column(title, justify="right", no_wrap=True)
    for result in results:
        table.add_row(str(result["preset"]), *(shown(result[key]) for key in OVERVIEW))
    Console().print(table)
