"""What a line means: colour is the fate of an edge in the update, dashes are deterministic steps."""

from dataclasses import dataclass

from branchgrpo.drawing.svg import Attribute, Svg

INK, FAINT, BAND = "#24292f", "#6e7781", "#f0f3f6"
TRAINED, PRUNED, UNTRAINED = "#1f5fbf", "#d9730d", "#8c959f"
GRANULARITY = ("#00876c", "#c2540a", "#8250df", "#7d4e00", "#a3216b")
LEGEND_ROW, LEGEND_SAMPLE, CHARACTER, NARROWEST = 20.0, 34.0, 7.0, 640.0


@dataclass(frozen=True)
class Line:
    """One kind of edge: how it is drawn and what the legend says."""

    name: str
    colour: str
    width: float
    dashed: bool
    label: str

    def attributes(self) -> dict[str, Attribute]:
        """Attributes of the group that holds edges of this kind."""
        values: dict[str, Attribute] = {"class_": self.name, "stroke": self.colour, "stroke_width": self.width}
        return {**values, "fill": "none", **({"stroke_dasharray": "5 3.5"} if self.dashed else {})}


LINES = {
    (False, "untrained"): Line("ode untrained", UNTRAINED, 1.3, True, "ODE: no noise, never trained"),
    (False, "pruned"): Line("ode pruned", PRUNED, 1.3, True, "ODE, pruned"),
    (True, "untrained"): Line("sde untrained", UNTRAINED, 1.5, False, "SDE, not trained"),
    (True, "pruned"): Line("sde pruned", PRUNED, 1.5, False, "SDE, pruned from the update"),
    (True, "trained"): Line("sde trained", TRAINED, 2.0, False, "SDE, trained"),
}
"""(stochastic, fate) → line, in drawing order: what is trained lies on top."""


@dataclass(frozen=True)
class Marker:
    """A legend entry that is a dot: its colour, radius and meaning."""

    colour: str
    radius: float
    label: str


def legend(svg: Svg, entries: list[Line | Marker], x: float, y: float, width: float) -> float:
    """Draw the legend in rows that fit ``width``, and return the y below it."""
    left = x
    with svg.group(class_="legend", font_size=12, fill=INK):
        for entry in entries:
            need = LEGEND_SAMPLE + CHARACTER * len(entry.label) + 18
            if left > x and left + need > x + width:
                left, y = x, y + LEGEND_ROW
            if isinstance(entry, Line):
                with svg.group(**entry.attributes()):
                    svg.add("path", d=f"M{left:.0f} {y:.0f}h26")
            else:
                svg.add("circle", cx=left + 13, cy=y, r=entry.radius, fill=entry.colour)
            svg.add("text", entry.label, x=left + LEGEND_SAMPLE, y=y + 4)
            left += need
    return y + LEGEND_ROW


def heading(svg: Svg, title: str, lines: list[str], x: float) -> float:
    """Draw the title and the lines under it, and return the y below them."""
    svg.add("text", title, x=x, y=30, font_size=18, font_weight="600", fill=INK)
    for i, line in enumerate(lines):
        svg.add("text", line, x=x, y=50 + 17 * i, font_size=12.5, fill=FAINT)
    return 42 + 17 * len(lines)


def page_width(columns: list[float], right: float, notes: list[str]) -> float:
    """A width that holds the columns, every note and the legend's rows."""
    return max(columns[-1] + right, NARROWEST, *(30 + CHARACTER * len(note) for note in notes))


def depth_axis(svg: Svg, columns: list[float], sigmas: tuple[float, ...], y: float) -> float:
    """Draw depths and noise levels under the columns, and return the y below them."""
    with svg.group(class_="axis", font_size=10, fill=FAINT, text_anchor="middle"):
        every = -(-len(columns) // 26)
        for depth, (x, sigma) in enumerate(zip(columns, sigmas, strict=True)):
            if depth % every == 0 or depth == len(columns) - 1:
                svg.add("text", str(depth), x=x, y=y)
                svg.add("text", f"{sigma:.2f}", x=x, y=y + 14)
    with svg.group(font_size=10, fill=FAINT, text_anchor="end"):
        svg.add("text", "depth", x=columns[0] - 18, y=y)
        svg.add("text", "σ", x=columns[0] - 18, y=y + 14)
    return y + 34
