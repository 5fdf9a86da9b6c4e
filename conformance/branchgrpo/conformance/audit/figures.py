"""The report's plots, as SVG elements with text that can be selected."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from branchgrpo.conformance.audit.context import Data

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8a93a1"
"""Told apart with any colour vision (Okabe–Ito)."""


def svg_of(figure: Figure, name: str) -> str:
    """The figure as an ``<svg>`` element; ids are made from ``name``, so that figures of one page do not collide."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def style(axes: Axes, x_label: str, y_label: str, title: str = "") -> None:
    """Labels, a light grid, and only the lower and left frame."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def qq_svg(data: Data) -> str:
    """QQ plots of the realised noise against N(0, 1), and the difference between the two."""
    plots = data["plots"]
    figure = Figure(figsize=(11.5, 4.0))
    whole, difference = figure.subplots(1, 2)
    for (name, plot), colour in zip(plots.items(), (BLUE, ORANGE), strict=False):
        theory = plot["theory"]
        whole.plot(theory, plot["found"], ".", color=colour, markersize=5, label=f"{name}, n = {plot['n']:,}")
        gap, low, high = (less(plot[key], theory) for key in ("found", "low", "high"))
        difference.fill_between(theory, low, high, color=colour, alpha=0.15, linewidth=0)
        difference.plot(theory, gap, ".-", color=colour, markersize=4, linewidth=0.8)
    ends = [min(min(p["theory"]) for p in plots.values()), max(max(p["theory"]) for p in plots.values())]
    whole.plot(ends, ends, color=GREY, linewidth=1)
    difference.axhline(0, color=GREY, linewidth=1)
    style(whole, "quantile of N(0, 1)", "quantile of (child − mean)/std", "Q–Q")
    style(difference, "quantile of N(0, 1)", "found − expected", "difference, and where 999 of 1,000 points fall")
    whole.legend(frameon=False)
    figure.tight_layout(w_pad=3)
    return svg_of(figure, "qq")


def less(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Differences, one by one."""
    return [value - other for value, other in zip(values, others, strict=True)]


def siblings_svg(data: Data) -> str:
    """Correlation of siblings against 1/(1 + s²)."""
    figure = Figure(figsize=(7.5, 3.8))
    axes = figure.subplots()
    points = [point for point in data["points"] if point["spread"] is not None]
    line = [0.2 * 1.1**i for i in range(45)]
    axes.plot(line, [1 / (1 + s * s) for s in line], color=GREY, linewidth=1.5, label="1/(1 + s²)")
    axes.errorbar(
        [point["spread"] for point in points],
        [point["found"] for point in points],
        yerr=[point["error"] for point in points],
        fmt="o",
        color=BLUE,
        capsize=3,
        label="found, ± 4 standard errors",
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    style(axes, "branch spread s", "correlation of siblings")
    axes.legend(frameon=False)
    return svg_of(figure, "siblings")


def concentration_svg(data: Data) -> str:
    """Effective number of leaves against the dimension, both reductions."""
    figure = Figure(figsize=(7.5, 3.8))
    axes = figure.subplots()
    for (name, curve), colour in zip(data["curves"].items(), (RED, BLUE), strict=True):
        axes.plot(curve["exact_D"], curve["exact"], "-", color=colour, linewidth=1.5, label=f"{name}: oracle")
        axes.errorbar(
            curve["D"],
            curve["measured"],
            yerr=[2 * error for error in curve["error"]],
            fmt="o",
            color=colour,
            markersize=5,
            capsize=3,
            label=f"{name}: implementation, ± 2 standard errors",
        )
    axes.axhline(data["leaves"], color=GREY, linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylim(0, data["leaves"] * 1.08)
    style(axes, "latent elements D", f"effective leaves of {data['leaves']}")
    axes.legend(frameon=False, fontsize=9, loc="center right", bbox_to_anchor=(1.0, 0.45))
    return svg_of(figure, "concentration")


def estimator_svg(data: Data) -> str:
    """The estimator step by step, rescaled to the gradient's size: exact expectation, measured mean, truth."""
    rows = data["rows"]
    columns = 4
    figure = Figure(figsize=(13.0, 2.9 * math.ceil(len(rows) / columns)))
    grid: Any = figure.subplots(math.ceil(len(rows) / columns), columns, sharex=True, sharey=True, squeeze=False)
    flat: Sequence[Axes] = list(grid.flatten())
    for axes, row in zip(flat, rows, strict=False):
        steps = range(len(row["truth"]))
        axes.bar(steps, row["truth"], color="#d7dce3", label="∇E[r]")
        axes.plot(steps, row["exact"], "_", color=BLUE, markersize=14, markeredgewidth=2.2, label="expectation")
        axes.plot(steps, row["found"], ".", color=ORANGE, label="measured mean")
        style(axes, "", "", row["component"])
        axes.title.set_fontsize(9)
    for axes in flat[len(rows) :]:
        axes.set_visible(False)
    flat[0].legend(frameon=False, fontsize=8)
    figure.supxlabel("denoising step", fontsize=10, y=0.02)
    figure.supylabel("gradient by the step's mean, along the reward", fontsize=10, x=0.005)
    figure.tight_layout()
    return svg_of(figure, "estimator")


FLOOR = 1e-8
"""What is less is drawn here: in float32 the child is kept as it was scored, and ratios are exactly 1."""


def precision_svg(data: Data) -> str:
    """Median |ρ − 1| of unchanged weights if a child is scored before it is rounded, against the clip range."""
    figure = Figure(figsize=(11.5, 3.8))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, reduction in zip(panels, ("mean", "sum"), strict=True):
        for dtype, colour in zip(("float32", "float16", "bfloat16"), (GREEN, BLUE, RED), strict=True):
            rows = [row for row in data["rows"] if row["dtype"] == dtype and row["reduction"] == reduction]
            xs = [row["D"] for row in rows]
            name = dtype if any(row["largest"] for row in rows) else f"{dtype}: 0"
            axes.plot(xs, [max(row["median"], FLOOR) for row in rows], "o-", color=colour, label=name)
            axes.plot(xs, [max(row["largest"], FLOOR) for row in rows], ":", color=colour)
        for clip in (1e-4, 1e-3):
            axes.axhline(clip, color=GREY, linewidth=1, linestyle="--")
        axes.set_xscale("log", base=4)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        style(axes, "latent elements D", "|ρ − 1|" if reduction == "mean" else "", f"{reduction} of the elements")
    for clip in (1e-4, 1e-3):
        panels[1].annotate(
            f"clip {clip:g}", (1.01, clip), xycoords=("axes fraction", "data"), fontsize=9, va="center", color=GREY
        )
    panels[0].legend(frameon=False, loc="lower left", bbox_to_anchor=(0.0, 0.05))
    figure.tight_layout(w_pad=2)
    return svg_of(figure, "precision")


def pruning_svg(data: Data) -> str:
    """Kept edges and cosine to the unpruned gradient, a rule a bar."""
    rows = [row for row in data["rows"] if "error" in row]
    figure = Figure(figsize=(9.0, 1.0 + 0.55 * max(1, len(rows))))
    share, cosine = figure.subplots(1, 2, sharey=True)
    names = [row["rule"] for row in rows]
    kept = share.barh(names, [row["kept"] / row["edges"] for row in rows], color=BLUE, height=0.5)
    angles = cosine.barh(names, [row["cosine"] for row in rows], color=ORANGE, height=0.5)
    share.bar_label(kept, [f"{row['kept']} of {row['edges']}" for row in rows], padding=4, fontsize=9)
    cosine.bar_label(angles, [f"{row['cosine']:.2f}".replace("-", "−") for row in rows], padding=4, fontsize=9)
    share.invert_yaxis()
    share.set_xlim(0, 1.2)
    lowest = min([0.0, *(row["cosine"] for row in rows)])
    cosine.set_xlim(lowest - 0.2 if lowest < 0 else 0.0, 1.2)
    cosine.axvline(0, color=GREY, linewidth=1)
    style(share, "trained edges kept", "")
    style(cosine, "cosine to the unpruned gradient", "")
    figure.tight_layout(w_pad=2)
    return svg_of(figure, "pruning")


def kills_svg(data: Data) -> str:
    """Who kills whom, mutants down and checks across, both in the order of their clauses."""
    checks = sorted(data["checks"].items(), key=lambda row: by_clause(row[1]["clause"]))
    mutants = sorted(data["mutants"].items(), key=lambda row: by_clause(row[1]["clause"]))
    column = {name: number for number, (name, _) in enumerate(checks)}
    clauses = {name: row["clause"] for name, row in checks}
    figure = Figure(figsize=(11.5, 10.5))
    axes = figure.subplots()
    for own, colour, label in ((True, BLUE, "of the clause that the mutant breaks"), (False, "#b9c3d0", "of another")):
        kills = [
            (column[name], number)
            for number, (_, row) in enumerate(mutants)
            for name in row["killed_by"]
            if name in column and (name in own_killers(row, clauses)) is own
        ]
        axes.plot(*zip(*kills, strict=True), "s", color=colour, markersize=4.5, label=label) if kills else None
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    for ticks, rows in ((axes.set_xticks, checks), (axes.set_yticks, mutants)):
        marks = chapters([row["clause"] for _, row in rows])
        ticks([start - 0.5 for start, _ in marks], [name for _, name in marks], fontsize=8)
    for tick in axes.get_xticklabels():
        tick.set(rotation=60, ha="left", rotation_mode="anchor")
    for tick in axes.get_yticklabels():
        tick.set(rotation=30, rotation_mode="anchor")
    axes.set_xlim(-1, len(checks))
    axes.set_ylim(len(mutants), -1)
    style(axes, f"{len(checks)} checks", f"{len(mutants)} mutants")
    axes.legend(frameon=False, title="killed by a check", loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=2)
    return svg_of(figure, "kills")


def own_killers(row: Data, clauses: Mapping[str, str]) -> set[str]:
    """The checks of a mutant's own clause that kill it.

    A check of several clauses is listed under one of them: where none is listed under the mutant's clause and the
    matrix says that one of that clause has killed it, it is such a check.
    """
    listed = {name for name in row["killed_by"] if clauses.get(name) == row["clause"]}
    return listed or (set(row["killed_by"]) if row.get("killed_by_own_clause", False) else set())


def by_clause(clause: str) -> tuple[str, int]:
    """A clause's place: its chapter, then its number."""
    chapter, _, number = clause.rpartition("-")
    return chapter, int("".join(filter(str.isdigit, number)) or 0)


def chapters(clauses: Sequence[str]) -> list[tuple[int, str]]:
    """Where each chapter begins in a sorted list of clauses."""
    names = [by_clause(clause)[0] for clause in clauses]
    return [(i, name) for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
