"""A plan family drawn as one tree: the anchor, the children of every k, their continuations of every granularity."""

from collections.abc import Sequence

from branchgrpo.drawing.style import (
    FAINT,
    GRANULARITY,
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
from branchgrpo.reference.family import PlanFamily

LEFT, RIGHT, COLUMN, LANE, GAP = 62.0, 36.0, 54.0, 4.0, 16.0
ANCHOR = Line("ode anchor", INK, 1.8, True, "anchor: ODE, shared by all")
CHILD = LINES[True, "trained"]
Prefix = tuple[int, ...]


def granularity_line(family: PlanFamily, members: Sequence[int]) -> Line:
    """The line of continuation edges that the λ at these positions of Λ share."""
    if len(members) > 1:
        return Line("ode shared", FAINT, 0.9, True, "ODE, shared by several λ")
    granularity = family.granularities[members[0]]
    colour = GRANULARITY[members[0] % len(GRANULARITY)]
    return Line(f"ode lambda-{granularity}", colour, 0.9, True, f"ODE, λ = {granularity}")


def continuation_edges(family: PlanFamily, k: int) -> dict[Prefix, list[int]]:
    """Distinct continuations from one child: every prefix of visited indices, with the positions of Λ that share it."""
    shared: dict[Prefix, list[int]] = {}
    for position, granularity in enumerate(family.granularities):
        visited = family.continuation(k, granularity)
        for length in range(1, len(visited) + 1):
            prefix = visited[:length] if length < len(visited) else (*visited, -1 - position)
            shared.setdefault(prefix, []).append(position)
    return shared


class FamilyDrawing:
    """Places and draws the parts of one root's family."""

    def __init__(self, family: PlanFamily, svg: Svg, top: float) -> None:
        self.family, self.svg, self.top = family, svg, top
        self.columns = [LEFT + COLUMN * depth for depth in range(family.steps + 1)]
        self.block = family.group * (len(family.granularities) + 1) * LANE
        self.lines: dict[str, Line] = {}

    @property
    def bottom(self) -> float:
        """The y below the last block."""
        return self.top + (self.block + GAP) * len(self.family.ks)

    def anchor_y(self, depth: int) -> float:
        """The anchor descends from block to block, level before the first k and straight between two."""
        ks = self.family.ks
        centres = [self.top + (self.block + GAP) * i + self.block / 2 for i in range(len(ks))]
        if depth <= ks[0]:
            return centres[0]
        after = next(i for i, k in enumerate(ks) if k >= depth)
        share = (depth - ks[after - 1]) / (ks[after] - ks[after - 1])
        return centres[after - 1] + share * (centres[after] - centres[after - 1])

    def lane_y(self, block: int, child: int, positions: Sequence[int]) -> float:
        """The y of a child's lanes, one for each λ and an empty one below; where several are shared, amid them."""
        lanes = [child * (len(self.family.granularities) + 1) + position + 1.0 for position in positions]
        return self.top + (self.block + GAP) * block + LANE * sum(lanes) / len(lanes)

    def draw_anchor(self) -> None:
        """Draw the anchor from the root to the last k."""
        last = self.family.ks[-1]
        with self.svg.group(**ANCHOR.attributes()):
            for depth in range(last):
                y0, y1 = self.anchor_y(depth), self.anchor_y(depth + 1)
                self.svg.add("path", d=curve(self.columns[depth], y0, self.columns[depth + 1], y1))
        with self.svg.group(class_="splits", fill=INK, stroke="#ffffff", stroke_width=1.2):
            for depth in range(last + 1):
                radius = 5 if depth in self.family.ks else 2.5
                self.svg.add("circle", cx=self.columns[depth], cy=self.anchor_y(depth), r=radius)

    def draw_children(self, block: int, k: int) -> None:
        """Draw the G stochastic edges of step k."""
        every = range(len(self.family.granularities))
        with self.svg.group(**{**CHILD.attributes(), "stroke_width": 1.4}):
            for child in range(self.family.group):
                y = self.lane_y(block, child, every)
                self.svg.add("path", d=curve(self.columns[k], self.anchor_y(k), self.columns[k + 1], y))
        with self.svg.group(class_="nodes", fill=CHILD.colour):
            for child in range(self.family.group):
                self.svg.add("circle", cx=self.columns[k + 1], cy=self.lane_y(block, child, every), r=1.9)

    def draw_continuations(self, block: int, k: int) -> None:
        """Draw every distinct deterministic edge below the children of step k, and the levels it visits."""
        shared = continuation_edges(self.family, k)
        for prefix, positions in shared.items():
            depths = [index for index in prefix if index >= 0]
            if len(depths) < 2:
                continue
            parent = shared[tuple(depths[:-1])]
            line = granularity_line(self.family, positions)
            self.lines.setdefault(line.name, line)
            x0, x1 = self.columns[depths[-2]], self.columns[depths[-1]]
            with self.svg.group(**line.attributes()):
                for child in range(self.family.group):
                    y0, y1 = self.lane_y(block, child, parent), self.lane_y(block, child, positions)
                    self.svg.add("path", d=curve(x0, y0, x1, y1))
            with self.svg.group(class_="nodes", fill=line.colour):
                for child in range(self.family.group):
                    self.svg.add("circle", cx=x1, cy=self.lane_y(block, child, positions), r=1.6)

    def draw(self) -> None:
        """Draw everything, the anchor on top."""
        for block, k in enumerate(self.family.ks):
            self.draw_continuations(block, k)
            self.draw_children(block, k)
            x, y = self.columns[k] - 10, self.anchor_y(k) + 20
            self.svg.add("text", f"k = {k}", x=x, y=y, font_size=11, fill=INK, text_anchor="end")
        self.draw_anchor()

    def legend_entries(self) -> list[Line | Marker]:
        """What was drawn, for the legend."""
        anchor = [ANCHOR] if self.family.ks[-1] > 0 else []
        split = Marker(INK, 5, f"split into {self.family.group} children")
        return [CHILD, *anchor, *sorted(self.lines.values(), key=lambda line: line.name), split]


def draw_family(family: PlanFamily, title: str, notes: Sequence[str] = ()) -> str:
    """An SVG of one root of a plan family, left to right from noise to sample.

    Args:
        family: the family.
        title: heading.
        notes: lines under the heading.
    """
    svg = Svg(title)
    drawing = FamilyDrawing(family, svg, heading(svg, title, list(notes), 20) + 14)
    drawing.draw()
    width = page_width(drawing.columns, RIGHT, list(notes))
    y = depth_axis(svg, drawing.columns, family.sigmas, drawing.bottom + 12)
    below = legend(svg, drawing.legend_entries(), 24, y, width - 40)
    return svg.render(width, below + 4)
