"""Forecasts as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PLANNER_MEANING = {
    "backbone": "the network",
    "parameters": "its weights, all experts",
    "trained_parameters": "weights that the optimiser changes",
    "latent_elements": "D, elements of one state",
    "latent_tokens": "tokens of one state",
    "text_tokens": "tokens of a prompt",
    "branches": "items a velocity: 2 under classifier-free guidance",
    "prompts": "of an iteration, over all GPUs",
    "flops_forward": "of one velocity, guidance included",
    "flops_backward": "of its gradient",
    "calls_rollout": "velocities of the rollout",
    "calls_update": "velocities that the update repeats with gradients",
    "calls_reference": "velocities of the frozen reference policy",
    "flops_rollout": "of all rollout calls",
    "flops_update": "of all forwards, recomputed forwards and backwards",
    "flops_reference": "of the reference policy",
    "flops_iteration": "rollout, update and reference together",
    "bytes_activations": "kept for the backward pass of one parent",
    "bytes_activations_checkpointed": "the same under gradient checkpointing",
    "ddp": "bytes on one GPU, weights on each",
    "fsdp2": "bytes on one GPU, weights sharded",
    "ratio_to_flat": "iteration time over that of flat GRPO",
}
"""Key of a forecast → what it says; the order of the table."""

MEMORY_MEANING = {
    "weights": "network, frozen reference, copies in low precision",
    "gradients": "float32",
    "optimizer": "AdamW's averages, the weights' moving average",
    "states": "all trees of the GPU's prompts",
    "activations": "of one micro-batch",
    "total": "sum; encoders, VAE, reward models and the allocator's slack come on top",
}
CAPTION = (
    "Arithmetic: matrix products and attention, 2 FLOPs a multiply-add. Ratio: FLOPs over FLOPs, calls equally "
    "efficient; reward models and the optimiser's step not counted. Flat GRPO: the same steps and leaves, chains "
    "that part from one noise at step 0, every step trained that can be."
)


def large(value: float) -> str:
    """A count with a decimal prefix: 37.3 T."""
    for exponent, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if abs(value) >= 10**exponent:
            return f"{value / 10**exponent:.3g} {prefix}"
    return f"{value:,}"


def gibibytes(value: float) -> str:
    """Bytes in GiB, MiB or KiB."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return f"{value / 1024**power:,.1f} {unit}"
    return f"{value:,.0f} B"


def cell(key: str, value: Any) -> str:
    """One value of a forecast as its table shows it."""
    if key.startswith("bytes_"):
        return gibibytes(value)
    if isinstance(value, float):
        return f"{value:.3f}"
    return value if isinstance(value, str) else large(value)


def print_forecast(result: Mapping[str, Any]) -> None:
    """Print one method's forecast: its iteration, then the memory of one GPU."""
    table = Table(title="one iteration", caption=CAPTION)
    table.add_column("forecast", no_wrap=True)
    table.add_column("value", justify="right", style="bold", no_wrap=True)
    table.add_column("meaning")
    for key, meaning in PLANNER_MEANING.items():
        if not isinstance(result[key], Mapping):
            table.add_row(key, cell(key, result[key]), meaning)
    memory = Table(title="memory of one GPU")
    memory.add_column("bytes", no_wrap=True)
    for name in ("ddp", "fsdp2"):
        memory.add_column(name, justify="right", style="bold", no_wrap=True)
    memory.add_column("meaning")
    for key, meaning in MEMORY_MEANING.items():
        memory.add_row(key, *(gibibytes(result[name][key]) for name in ("ddp", "fsdp2")), meaning)
    console = Console()
    console.print(table)
    console.print(memory)


def print_forecasts(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Print all methods side by side."""
    first = rows[0][1]
    size = f"{first['backbone']}, {first['latent_tokens']:,} tokens, {first['prompts']} prompts an iteration"
    table = Table(title=size, caption=CAPTION, box=SIMPLE_HEAD, padding=(0, 0))
    table.add_column("preset", no_wrap=True)
    for title in ("rollout\ncalls", "update\ncalls", "FLOPs", "states", "ddp", "fsdp2", "ratio\nto flat"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, row in rows:
        table.add_row(
            name,
            large(row["calls_rollout"]),
            large(row["calls_update"]),
            large(row["flops_iteration"]),
            gibibytes(row["ddp"]["states"]),
            gibibytes(row["ddp"]["total"]),
            gibibytes(row["fsdp2"]["total"]),
            f"{row['ratio_to_flat']:.3f}",
        )
    Console().print(table)
