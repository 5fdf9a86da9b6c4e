"""Pictures over depth, phase and time: heat maps, the time's phases, when the monitors spoke."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from branchgrpo.training.demo.figures import style, svg_of
from branchgrpo.training.logs.report.curves import GREY, MOST, ORANGE, RED, mark_resumes, thin
from branchgrpo.training.logs.report.history import History
from branchgrpo.training.logs.report.summary import Warned

PHASE_COLOURS = {
    "rollout": "#0072B2",
    "reward": "#E69F00",
    "tail": "#CC79A7",
    "update": "#009E73",
    "monitors": "#D55E00",
    "costly": "#8b93a1",
    "other": "#56B4E9",
}
"""A colour a phase, told apart with any colour vision; phases that are not listed are grey."""


def depth_svg(history: History, prefix: str, label: str) -> str | None:
    """A number a depth over iterations as a heat map, the root side at the top; None where there is none.

    Args:
        history: of the run.
        prefix: of the numbers' names, before ``/depth_DD``.
        label: of the colours.
    """
    names = sorted(history.names(f"{prefix}/depth_"))
    if not names:
        return None
    depths = list(range(int(names[0]), int(names[-1]) + 1))
    last = max(record["iteration"] for record in history.iterations)
    width = min(last + 1, MOST)
    table = np.full((len(depths), width), np.nan)
    for name in names:
        at, values = history.curve(f"{prefix}/depth_{name}")
        columns = (at * width // (last + 1)).astype(int)
        for column in np.unique(columns):
            chosen = values[columns == column]
            if np.isfinite(chosen).any():
                table[int(name) - depths[0], column] = np.nanmean(chosen)
    figure = Figure(figsize=(14.0, min(4.5, 1.4 + 0.12 * len(depths))))
    axes = figure.subplots()
    extent = (-0.5, last + 0.5, depths[-1] + 0.5, depths[0] - 0.5)
    image = axes.imshow(table, aspect="auto", interpolation="none", extent=extent, cmap="viridis")
    axes.set_facecolor("#eceff3")
    axes.set_xlabel("iteration")
    axes.set_ylabel("depth")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    figure.colorbar(image, label=label, pad=0.015)
    return svg_of(figure, prefix)


def phases_svg(history: History) -> str | None:
    """Seconds an iteration by phase, stacked; None before the first iteration."""
    names = [name for name in PHASE_COLOURS if any(name in r.get("seconds", {}) for r in history.iterations)]
    names += sorted({n for r in history.iterations for n in r.get("seconds", {})} - set(names))
    if not names:
        return None
    at = np.array([float(record["iteration"]) for record in history.iterations])
    rows = [np.array([record["seconds"].get(name) or 0.0 for record in history.iterations]) for name in names]
    curves = [thin(at, row) for row in rows]
    figure = Figure(figsize=(13.0, 2.9))
    axes = figure.subplots()
    colours = [PHASE_COLOURS.get(name, GREY) for name in names]
    axes.stackplot(curves[0].at, *(curve.mean for curve in curves), labels=names, colors=colours, linewidth=0)
    mark_resumes(axes, history)
    style(axes, "iteration", "seconds")
    total = np.sum([curve.mean for curve in curves], axis=0)
    axes.set_ylim(0.0, 1.25 * float(np.percentile(total, 99)))
    axes.legend(frameon=False, ncols=len(names), loc="upper right", fontsize=9)
    return svg_of(figure, "phases")


def findings_svg(warned: tuple[Warned, ...], iterations: int) -> str | None:
    """When each monitor was beyond a limit: a row each; None where none ever was."""
    if not warned:
        return None
    figure = Figure(figsize=(13.0, 0.75 + 0.3 * len(warned)))
    axes = figure.subplots()
    for row, entry in enumerate(warned):
        colour = RED if entry.level == "stop" else ORANGE
        marks = np.unique(np.array(entry.iterations) * MOST // max(iterations, 1)) * max(iterations, 1) / MOST
        axes.plot(marks, [row] * len(marks), "|", color=colour, markersize=11, markeredgewidth=1.6)
    axes.set_yticks(range(len(warned)), [entry.key for entry in warned], fontsize=9)
    axes.set_ylim(len(warned) - 0.4, -0.6)
    axes.set_xlim(-0.5, max(iterations, 1) - 0.5)
    axes.set_xlabel("iteration")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    return svg_of(figure, "findings")
