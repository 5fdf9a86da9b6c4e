"""A plan drawn as the tree it grows."""

import math
from collections.abc import Sequence

from branchgrpo.drawing.style import (
    BAND,
    FAINT,
    INK,
    LINES,
    Line,
    Marker,
    depth_axis,
    heading,
    legend,
    page_width,
)
from branchgrpo.drawing.svg import Svg, curve
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.plan import Plan

LEFT, RIGHT, COLUMN, ROW, TALLEST = 62.0, 48.0, 46.0, 25.0, 1200.0
Mask = Sequence[Sequence[bool]]
"""Entry d − 1 holds one value for each edge that ends at depth d: R·n_d of them, level order, roots outermost."""


def check_mask(name: str, mask: Mask, plan: Plan) -> None:
    """Raise ``InputError`` unless ``mask`` has one value an edge."""
    found, legal = [len(level) for level in mask], [plan.roots * n for n in plan.level_sizes[1:]]
    if found != legal:
        raise InputError(f"{name} edges a depth", found, f"{legal}, those of the plan")


def rows(plan: Plan) -> list[list[float]]:
    """For each depth the rows of its nodes: leaves at 0, 1, 2, …, every other node amid its children."""
    levels = [[float(i) for i in range(plan.roots * plan.leaves)]]
    for factor in reversed(plan.branching):
        below = levels[0]
        parents = range(0, len(below), factor)
        levels.insert(0, [(below[j] + below[j + factor - 1]) / 2 for j in parents])
    return levels


def lines_of_edges(plan: Plan, kept: Mask, trained: Mask) -> list[list[Line]]:
    """For each depth ≥ 1 the line of every edge that ends there."""
    lines = []
    for step in range(plan.steps):
        noisy = step in plan.stochastic_steps
        fates = (
            "pruned" if not stays else "trained" if learns else "untrained"
            for stays, learns in zip(kept[step], trained[step], strict=True)
        )
        lines.append([LINES[noisy, fate] for fate in fates])
    return lines


def draw_splits(svg: Svg, plan: Plan, columns: list[float], top: float, bottom: float) -> None:
    """Shade the split steps and write K and s over them."""
    for step in plan.splits:
        x, width = columns[step], columns[step + 1] - columns[step]
        spread = "∞" if math.isinf(plan.spreads[step]) else f"{plan.spreads[step]:g}"
        svg.add("rect", class_="split", x=x, y=top, width=width, height=bottom - top, fill=BAND)
        with svg.group(font_size=10, fill=FAINT, text_anchor="middle"):
            svg.add("text", f"K = {plan.branching[step]}", x=x + width / 2, y=top - 16)
            svg.add("text", f"s = {spread}", x=x + width / 2, y=top - 4)


def draw_nodes(svg: Svg, plan: Plan, columns: list[float], places: list[list[float]]) -> None:
    """Draw splitting nodes large, all others small, and number the leaves' rewards where there is room."""
    with svg.group(class_="nodes", fill=FAINT):
        for depth, level in enumerate(places):
            if depth not in plan.splits:
                for y in level:
                    svg.add("circle", cx=columns[depth], cy=y, r=1.8)
    with svg.group(class_="splits", fill=INK, stroke="#ffffff", stroke_width=1.2):
        for depth in plan.splits:
            for y in places[depth]:
                svg.add("circle", cx=columns[depth], cy=y, r=5)
    if len(places[-1]) <= 64:
        with svg.group(class_="rewards", font_size=10, fill=FAINT):
            for leaf, y in enumerate(places[-1]):
                svg.add("text", f"r{leaf}", x=columns[-1] + 8, y=y + 3.5)


def draw_tree(plan: Plan, kept: Mask, trained: Mask, title: str, notes: Sequence[str] = ()) -> str:
    """An SVG of the plan's trees for one prompt, left to right from noise to sample.

    Args:
        plan: the plan; all its R roots are drawn.
        kept: edges that pruning leaves in the update.
        trained: edges that the update trains; a kept edge that is not trained carries no signal.
        title: heading.
        notes: lines under the heading.

    Raises:
        InputError: a mask whose sizes are not those of the plan.
    """
    check_mask("kept", kept, plan)
    check_mask("trained", trained, plan)
    columns = [LEFT + COLUMN * depth for depth in range(plan.steps + 1)]
    width = page_width(columns, RIGHT, list(notes))
    svg = Svg(title)
    top = heading(svg, title, list(notes), 20) + 36
    leaves = plan.roots * plan.leaves
    spacing = min(ROW, TALLEST / leaves)
    places = [[top + spacing * (row + 0.5) for row in level] for level in rows(plan)]
    bottom = top + spacing * leaves
    draw_splits(svg, plan, columns, top, bottom)
    lines = lines_of_edges(plan, kept, trained)
    for line in LINES.values():
        if not any(line in level for level in lines):
            continue
        with svg.group(**line.attributes()):
            for step, level in enumerate(lines):
                for j, found in enumerate(level):
                    if found is line:
                        y0 = places[step][j // plan.branching[step]]
                        svg.add("path", d=curve(columns[step], y0, columns[step + 1], places[step + 1][j]))
    draw_nodes(svg, plan, columns, places)
    y = depth_axis(svg, columns, plan.sigmas, bottom + 20)
    present = [line for line in LINES.values() if any(line in level for level in lines)]
    split = [Marker(INK, 5, "split: children of one model call")] if plan.splits else []
    below = legend(svg, [*reversed(present), *split], 24, y, width - 40)
    return svg.render(width, below + 4)
