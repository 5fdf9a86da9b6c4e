"""The report's pictures: reward curves as SVG, sample grids as PNG."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

COLOURS: Mapping[str, str] = {"branchgrpo": "#0072B2", "dancegrpo": "#E69F00", "g2rpo": "#009E73"}
"""A colour a method, told apart with any colour vision (Okabe–Ito)."""


def svg_of(figure: Figure, name: str, *, crop: bool = True) -> str:
    """The figure as an ``<svg>`` element with text that can be selected; its ids are made from ``name``.

    With ``crop`` it is as large as what is drawn; without, it keeps its size, so that several can stand in a row.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "image.composite_image": False}):
        figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight" if crop else None
        )
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def style(axes: Axes, x_label: str, y_label: str) -> None:
    """Label the axes; only the lower and left frame and a light grid."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def curve_band(axes: Axes, runs: Sequence[Mapping[str, Any]], x: str, y: str, colour: str, label: str) -> None:
    """One method: the runs as thin lines, their mean as a thick one, and the seeds' spread (± 1 sd) as a band."""
    curves = [np.array([(point[x], point[y]) for point in run["curve"]], dtype=float).T for run in runs]
    for xs, ys in curves:
        axes.plot(xs, ys, color=colour, linewidth=0.7, alpha=0.5)
    common = np.linspace(0.0, min(xs[-1] for xs, _ in curves), 200)  # up to where every run has a value
    values = np.stack([np.interp(common, xs, ys) for xs, ys in curves])
    mean = values.mean(axis=0)
    axes.plot(common, mean, color=colour, linewidth=2.2, label=label)
    if len(runs) > 1:
        sd = values.std(axis=0, ddof=1)
        axes.fill_between(common, mean - sd, mean + sd, color=colour, alpha=0.18, linewidth=0)


def curves_svg(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Reward against denoiser calls and against seconds of training, and the judge's accuracy against calls.

    Args:
        methods: ``methods`` of the results document.
    """
    figure = Figure(figsize=(13.0, 3.9))
    by_calls, by_seconds, judged = figure.subplots(1, 3)
    for name, entry in methods.items():
        drawn = (COLOURS[name], entry["label"])
        curve_band(by_calls, entry["runs"], "calls", "reward", *drawn)
        curve_band(by_seconds, entry["runs"], "seconds", "reward", *drawn)
        curve_band(judged, entry["runs"], "calls", "judge", *drawn)
    style(by_calls, "denoiser calls, rollout and update", "mean reward")
    style(by_seconds, "seconds of training", "mean reward")
    style(judged, "denoiser calls, rollout and update", "read correctly by the judge")
    for axes in (by_calls, judged):
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")
    lowest = min(point["judge"] for entry in methods.values() for run in entry["runs"] for point in run["curve"])
    judged.set_ylim(min(0.95, lowest - 0.01), 1.002)
    judged.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    by_calls.legend(frameon=False, loc="lower right")
    figure.tight_layout(w_pad=2.5)
    return svg_of(figure, "curves")


def grid_png(samples: NDArray[np.float32], gap: int = 1) -> str:
    """A grid of 8×8 images as a PNG data URI, dark strokes on white, one pixel a pixel: the page enlarges it.

    Args:
        samples: ``[rows, columns, 8, 8]`` in [−1, 1]; values beyond are cut off.
        gap: white pixels between images.
    """
    rows, columns = samples.shape[:2]
    grid = np.full((rows * (8 + gap) - gap, columns * (8 + gap) - gap), 255, dtype=np.uint8)
    shades = np.rint(255.0 * (1.0 - (samples.clip(-1.0, 1.0) + 1.0) / 2.0)).astype(np.uint8)
    for row in range(rows):
        for column in range(columns):
            top, left = row * (8 + gap), column * (8 + gap)
            grid[top : top + 8, left : left + 8] = shades[row, column]
    buffer = io.BytesIO()
    Image.fromarray(grid).save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
