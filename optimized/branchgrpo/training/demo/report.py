"""The demo's report: one HTML file that needs nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from branchgrpo.training.demo.figures import COLOURS, curves_svg, grid_png
from branchgrpo.training.demo.tree_figure import GrownTree, tree_svg

TEMPLATE = Path(__file__).with_name("report.html.j2")


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images that the report shows.

    Attributes:
        before: the base model's samples, ``[rows, 10, 8, 8]``, a digit a column.
        after: a method's samples from the same noise, seed 0.
        tree: a tree of BranchGRPO's first iteration, seed 0.
    """

    before: NDArray[np.float32]
    after: Mapping[str, NDArray[np.float32]]
    tree: GrownTree


def render_report(results: Mapping[str, Any], pictures: Pictures) -> str:
    """The report as HTML.

    Args:
        results: the results document.
        pictures: sample grids and the tree.
    """
    from jinja2 import Environment, StrictUndefined, select_autoescape

    environment = Environment(
        undefined=StrictUndefined, autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["thousands"] = lambda value: f"{value:,.0f}"
    environment.filters["fixed"] = lambda value, digits: "–" if value is None else f"{value:.{digits}f}"
    environment.filters["percent"] = lambda value: f"{100 * value:.1f} %"
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        results=results,
        colours=COLOURS,
        curves=curves_svg(results["methods"]),
        tree=pictures.tree,
        tree_svg=tree_svg(pictures.tree),
        before=grid_png(pictures.before),
        after={method: grid_png(samples) for method, samples in pictures.after.items()},
    )
