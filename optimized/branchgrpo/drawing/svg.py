"""A small SVG writer: escaped text, fixed number format, the same bytes for the same drawing."""

from collections.abc import Iterator
from contextlib import contextmanager
from xml.sax.saxutils import escape, quoteattr

Attribute = str | float | int


def number(value: float) -> str:
    """A coordinate with at most two decimals and no trailing zeros."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def attributes(values: dict[str, Attribute]) -> str:
    """Attributes as XML; ``stroke_width`` becomes ``stroke-width`` and ``class_`` becomes ``class``."""
    parts = []
    for name, value in values.items():
        text = value if isinstance(value, str) else number(value)
        parts.append(f" {name.rstrip('_').replace('_', '-')}={quoteattr(text)}")
    return "".join(parts)


class Svg:
    """A drawing of fixed size; elements appear in the order in which they are added.

    Colours and widths are attributes, not style sheets, so that drawings can share a page without mixing.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.lines: list[str] = []
        self.level = 1

    def add(self, tag: str, text: str | None = None, **values: Attribute) -> None:
        """Add one element, with escaped text inside where there is any."""
        inside = "/>" if text is None else f">{escape(text)}</{tag}>"
        self.lines.append(f"{'  ' * self.level}<{tag}{attributes(values)}{inside}")

    @contextmanager
    def group(self, **values: Attribute) -> Iterator[None]:
        """Elements added inside share these attributes."""
        self.lines.append(f"{'  ' * self.level}<g{attributes(values)}>")
        self.level += 1
        yield
        self.level -= 1
        self.lines.append(f"{'  ' * self.level}</g>")

    def render(self, width: float, height: float) -> str:
        """The document: a white page of this size under everything that was added."""
        size = f"{number(width)} {number(height)}"
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{number(width)}" '
                f'height="{number(height)}" role="img" font-family="system-ui, Helvetica, Arial, sans-serif">',
                f"  <title>{escape(self.title)}</title>",
                f'  <rect width="{number(width)}" height="{number(height)}" fill="#ffffff"/>',
                *self.lines,
                "</svg>\n",
            )
        )


def curve(x0: float, y0: float, x1: float, y1: float) -> str:
    """Path data of an edge that leaves and arrives horizontally."""
    middle = (x0 + x1) / 2
    points = [number(v) for v in (x0, y0, middle, y0, middle, y1, x1, y1)]
    return "M{} {}C{} {} {} {} {} {}".format(*points)
