"""Curves of a long run, thinned to what a page can show, with gaps where a number was not finite."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from branchgrpo.training.demo.figures import style, svg_of
from branchgrpo.training.logs.report.history import History, Numbers
from branchgrpo.training.monitors.limits import MONITORS

MOST = 400
"""Points of a curve; longer ones show mean and range of equal bins."""
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#b3261e", "#8b93a1"
"""Training, held out or warning, evaluation, stop, and everything else: told apart with any colour vision."""


@dataclass(frozen=True, eq=False)
class Thinned:
    """A curve in bins: where, mean, smallest and largest."""

    at: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers


def thin(at: Numbers, values: Numbers, most: int = MOST) -> Thinned:
    """At most ``most`` bins of equal numbers of points; a bin with a value that is not finite is a gap."""
    if len(at) <= most:
        return Thinned(at, values, values, values)
    parts = np.array_split(np.arange(len(at)), most)
    table = np.array([(at[p].mean(), values[p].mean(), values[p].min(), values[p].max()) for p in parts])
    return Thinned(*table.T)


def smooth(values: Numbers, window: int) -> Numbers:
    """Mean over the last ``window`` finite values at every place; NaN where there is none."""
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    count = counts[ends] - counts[starts]
    result: Numbers = np.where(count > 0, (sums[ends] - sums[starts]) / np.maximum(count, 1), np.nan)
    return result


def mark_resumes(axes: Axes, history: History) -> None:
    """A thin line where a later process went on."""
    for at in history.resumed:
        axes.axvline(at, color=GREY, linewidth=0.8, linestyle=":")


def draw_spread(axes: Axes, history: History, name: str, colour: str) -> None:
    """A reward of training: mean of an iteration faint, its running mean bold, and a band of one std around it."""
    at, mean = history.curve(f"reward/{name}/mean")
    _, std = history.curve(f"reward/{name}/std")
    if len(at) == 0:
        return
    window = max(1, len(at) // 40)
    curve, spread = thin(at, smooth(mean, window)), thin(at, smooth(std, window))
    raw = thin(at, mean)
    axes.fill_between(
        curve.at, curve.mean - spread.mean, curve.mean + spread.mean, color=colour, alpha=0.13, linewidth=0
    )
    axes.plot(raw.at, raw.mean, color=colour, linewidth=0.6, alpha=0.45)
    axes.plot(curve.at, curve.mean, color=colour, linewidth=1.8, label="training samples, ± 1 std")


def draw_evaluation(axes: Axes, history: History, name: str, held: bool) -> None:
    """A reward of the evaluations, with standard errors."""
    at, mean = history.curve(f"evaluation/{name}/mean", "evaluation")
    if len(at) == 0:
        return
    by_iteration = dict(zip(*history.curve(f"evaluation/{name}/stderr", "evaluation"), strict=True))
    errors = np.array([by_iteration.get(i, 0.0) for i in at])
    colour, label = (ORANGE, "evaluation, held-out reward") if held else (GREEN, "evaluation")
    shown: dict[str, Any] = {"marker": "o", "markersize": 3.5, "linewidth": 1.6, "capsize": 2.5, "elinewidth": 1.0}
    axes.errorbar(at, mean, errors, color=colour, label=f"{label}, ± 1 standard error", **shown)


def reward_panels(history: History) -> list[tuple[str, bool]]:
    """Every reward's name, and whether it is held out; trained ones first."""
    held = {name for record in history.evaluations for name in record.get("held_out", ())}
    names = dict.fromkeys([*history.names("reward/", "/mean"), *history.names("evaluation/", "/mean", "evaluation")])
    return sorted(((name, name in held) for name in names), key=lambda entry: entry[1])


def rewards_svg(history: History) -> str | None:
    """A panel a reward; None where nothing was scored yet."""
    panels = reward_panels(history)
    if not panels:
        return None
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(13.0 if columns > 1 else 8.0, 3.9 * rows))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (name, held) in zip(grid.flat, panels, strict=False):
        draw_spread(axes, history, name, BLUE)
        draw_evaluation(axes, history, name, held)
        mark_resumes(axes, history)
        style(axes, "iteration", "reward")
        axes.set_title(plain(name), fontsize=11, loc="left", fontweight="bold")
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, fontsize=8.5, loc="best")
    figure.tight_layout(w_pad=2.5, h_pad=2.0)
    return svg_of(figure, "rewards")


def plain(text: str) -> str:
    """Text that matplotlib shows as it is, without reading mathematics into it."""
    return text.replace("$", r"\$")


def wide_range(values: Sequence[float], limits: Mapping[str, float]) -> bool:
    """Whether a logarithmic axis serves better: all positive, over more than two decades with the thresholds."""
    shown = [*values, *limits.values()]
    return bool(shown) and min(shown) > 0.0 and max(shown) / min(shown) > 100.0


def monitor_svg(history: History, monitor: str, key: str, kind: str) -> str | None:
    """One monitor with its thresholds and the side that is bad; None where it was never measured."""
    at, values = history.curve(key, kind)
    known = values[np.isfinite(values)]
    if len(known) == 0:
        return None
    limits = history.limits(monitor)
    figure = Figure(figsize=(4.6, 2.35))
    axes = figure.add_axes((0.14, 0.21, 0.76, 0.74))
    curve = thin(at, values)
    axes.fill_between(curve.at, curve.low, curve.high, color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(curve.at, curve.mean, color=BLUE, linewidth=1.3, marker="o" if len(known) < 30 else None, markersize=2.8)
    broken = at[~np.isfinite(values)]
    for place in broken[:50]:
        axes.axvline(place, color=RED, linewidth=1.0)
    if wide_range(known.tolist(), limits):
        axes.set_yscale("log")
    draw_limits(axes, limits, MONITORS[monitor].side)
    mark_resumes(axes, history)
    style(axes, "iteration", "")
    return svg_of(figure, f"{kind}-{key}", crop=False)


def draw_limits(axes: Axes, limits: Mapping[str, float], side: str) -> None:
    """Thresholds as lines within the picture, and the side beyond the first of them shaded."""
    low, high = axes.get_ylim()
    linear = axes.get_yscale() == "linear"
    if limits:
        low, high = min(low, *limits.values()), max(high, *limits.values())
        room = 0.08 * (high - low) if linear else 0.0
        axes.set_ylim(low - room if linear else low / 1.5, high + room if linear else high * 1.5)
    for level, value in limits.items():
        colour = ORANGE if level == "warn" else RED
        axes.axhline(value, color=colour, linewidth=1.2, linestyle="--")
        axes.annotate(
            level, (1.0, value), xycoords=("axes fraction", "data"), xytext=(3, 0), textcoords="offset points",
            fontsize=8, color=colour, va="center",
        )  # fmt: skip
        bottom, top = axes.get_ylim()
        beyond = (value, top) if side == "above" else (bottom, value)
        axes.axhspan(*beyond, color=colour, alpha=0.07, linewidth=0)
        axes.set_ylim(bottom, top)
