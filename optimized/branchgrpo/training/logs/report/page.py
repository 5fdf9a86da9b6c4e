"""The report of a run: one HTML file that needs nothing else."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from branchgrpo.training.logs.report.history import History, read_history
from branchgrpo.training.logs.report.summary import Summary, summarise
from branchgrpo.training.monitors.limits import MONITORS

TEMPLATE = Path(__file__).with_name("report.html.j2")

STATUS = {
    "finished": "finished",
    "interrupted": "interrupted",
    "stopped": "stopped by a monitor",
    "failed": "failed",
    "open": "running or cut off",
}


@dataclass(frozen=True)
class Panel:
    """One monitor in the report.

    Attributes:
        key: name of the number; ``title`` for people.
        svg: its curve with thresholds.
        last: newest value; NaN where it was not finite.
        advice: what it means when it is beyond a limit.
        warned: whether it ever was.
    """

    key: str
    title: str
    svg: str
    last: float
    advice: str
    warned: bool


def panels_of(history: History, summary: Summary) -> list[Panel]:
    """A panel for every monitor that was measured, in the order of the configuration."""
    from branchgrpo.training.logs.report.curves import monitor_svg

    spoke = {entry.key for entry in summary.warned}
    found = []
    for name, monitor in MONITORS.items():
        for key in monitor.keys:
            for kind in ("iteration", "evaluation"):
                svg = monitor_svg(history, name, key, kind)
                if svg is not None:
                    last = float(history.curve(key, kind)[1][-1])
                    title = monitor.title + (", evaluation" if key.startswith("evaluation/") else "")
                    found.append(Panel(key, title, svg, last, monitor.advice, key in spoke))
    return found


def pictures_of(history: History, summary: Summary) -> dict[str, Any]:
    """Everything drawn."""
    from branchgrpo.training.logs.report.curves import rewards_svg
    from branchgrpo.training.logs.report.maps import depth_svg, findings_svg, phases_svg
    from branchgrpo.training.logs.report.samples import sheets_of

    return {
        "rewards": rewards_svg(history),
        "panels": panels_of(history, summary),
        "findings": findings_svg(summary.warned, max(summary.done, 1)),
        "maps": [
            (title, text, svg)
            for title, text, prefix, label in (
                ("Advantages", "Standard deviation of a depth's advantages over all nodes.", "advantage_spread", "std"),
                ("Fused rewards", "Standard deviation of a depth's fused rewards within a tree, mean over trees: what "
                 "there is to prefer.", "value_spread", "std"),
                ("Gradient", "Norm of each depth's part of the gradient, before clipping.", "gradient_norm", "norm"),
            )
            if (svg := depth_svg(history, prefix, label)) is not None
        ],
        "phases": phases_svg(history),
        "sheets": sheets_of(history),
    }  # fmt: skip


def moment(seconds: float) -> str:
    """A moment for people, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def significant(value: float | None, digits: int = 4) -> str:
    """A number for a table; a dash where there is none."""
    return "–" if value is None else "not finite" if value != value else f"{value:.{digits}g}"


def render(history: History, summary: Summary) -> str:
    """The report as HTML; every text of the run is escaped."""
    from jinja2 import Environment, StrictUndefined, select_autoescape

    environment = Environment(
        undefined=StrictUndefined, autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = significant
    environment.filters["moment"] = moment
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    starts = history.of_kind("start")
    return template.render(
        name=history.folder.resolve().name,
        summary=summary,
        status=STATUS.get(summary.status, summary.status),
        start=starts[-1] if starts else None,
        starts=starts,
        resumed=history.resumed,
        updated=history.records[-1].get("time") if history.records else None,
        config=history.config_text,
        method=history.config.get("method", {}).get("preset", ""),
        source=history.config.get("model", {}).get("source", ""),
        **pictures_of(history, summary),
    )


def make_report(folder: Path) -> tuple[str, Summary]:
    """Report and summary of a run, finished or not.

    Raises:
        InputError: see ``read_history``.
    """
    history = read_history(folder)
    summary = summarise(history)
    return render(history, summary), summary
