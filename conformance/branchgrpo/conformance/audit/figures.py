"""The report's plots, as SVG elements with text that can be selected."""

import io
import math
from collections.abc import Sequence
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
        whole.plot(plot["theory"], plot["found"], ".", color=colour, markersize=5, label=f"{name}, n = {plot['n']:,}")
        gap = [found - theory for found, theory in zip(plot["found"], plot["theory"], strict=True)]
        difference.plot(plot["theory"], gap, ".-", color=colour, markersize=4, linewidth=0.8)
    ends = [min(min(p["theory"]) for p in plots.values()), max(max(p["theory"]) for p in plots.values())]
    whole.plot(ends, ends, color=GREY, linewidth=1)
    difference.axhline(0, color=GREY, linewidth=1)
    style(whole, "quantile of N(0, 1)", "quantile of (child − mean)/std", "Q–Q")
    style(difference, "quantile of N(0, 1)", "found − expected", "difference; the tails scatter most")
    whole.legend(frameon=False)
    figure.tight_layout(w_pad=3)
    return svg_of(figure, "qq")


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
        axes.plot(curve["D"], curve["measured"], "o", color=colour, markersize=5, label=f"{name}: implementation")
    axes.axhline(data["leaves"], color=GREY, linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylim(0, data["leaves"] * 1.08)
    style(axes, "latent elements D", f"effective leaves of {data['leaves']}")
    axes.legend(frameon=False, ncols=2)
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
    figure.supxlabel("denoising step", fontsize=10)
    figure.tight_layout()
    return svg_of(figure, "estimator")


def precision_svg(data: Data) -> str:
    """Median |ρ − 1| of unchanged weights if a child is scored before it is rounded, against the clip range."""
    figure = Figure(figsize=(11.5, 3.8))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, reduction in zip(panels, ("mean", "sum"), strict=True):
        for dtype, colour in zip(("float32", "float16", "bfloat16"), (GREEN, BLUE, RED), strict=True):
            rows = [row for row in data["rows"] if row["dtype"] == dtype and row["reduction"] == reduction]
            xs = [row["D"] for row in rows]
            axes.plot(xs, [max(row["median"], 1e-12) for row in rows], "o-", color=colour, label=dtype)
            axes.plot(xs, [max(row["largest"], 1e-12) for row in rows], ":", color=colour)
        for clip in (1e-4, 1e-3):
            axes.axhline(clip, color=GREY, linewidth=1, linestyle="--")
            axes.text(xs[0], clip * 1.15, f"clip {clip:g}", fontsize=8, color=GREY)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        style(axes, "latent elements D", "|ρ − 1|" if reduction == "mean" else "", f"{reduction} of the elements")
    panels[0].legend(frameon=False)
    figure.tight_layout(w_pad=2)
    return svg_of(figure, "precision")


def pruning_svg(data: Data) -> str:
    """Kept edges and cosine to the unpruned gradient, a rule a bar."""
    rows = [row for row in data["rows"] if "error" in row]
    figure = Figure(figsize=(9.0, 1.0 + 0.55 * max(1, len(rows))))
    share, cosine = figure.subplots(1, 2, sharey=True)
    names = [row["rule"] for row in rows]
    share.barh(names, [row["kept"] / row["edges"] for row in rows], color=BLUE, height=0.5)
    cosine.barh(names, [row["cosine"] for row in rows], color=ORANGE, height=0.5)
    share.invert_yaxis()
    for axes in (share, cosine):
        axes.set_xlim(0, 1)
    style(share, "trained edges kept", "")
    style(cosine, "cosine to the unpruned gradient", "")
    figure.tight_layout(w_pad=2)
    return svg_of(figure, "pruning")


def kills_svg(data: Data) -> str:
    """Mutants killed by each check, most first."""
    rows = sorted(((len(row["kills"]), name) for name, row in data["checks"].items()), reverse=True)
    figure = Figure(figsize=(11.5, 3.2))
    axes = figure.subplots()
    axes.bar(range(len(rows)), [count for count, _ in rows], color=[BLUE if count else RED for count, _ in rows])
    axes.set_xlim(-1, len(rows))
    style(axes, "checks, by kills", "mutants killed")
    return svg_of(figure, "kills")
