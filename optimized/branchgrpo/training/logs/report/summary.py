"""What a run's history comes to: how it ended, what the rewards did, what the monitors said, where the time went."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from branchgrpo.training.logs.report.history import History

SIGNIFICANT = 2.0
"""Standard errors from which a change is called one."""

LOOP = ("tail", "monitors", "other")
"""Phases that are the loop's own work: neither sampling, nor scoring, nor the update."""


@dataclass(frozen=True)
class Change:
    """One reward from the first to the last evaluation, paired by prompt.

    Attributes:
        name: of the reward model.
        held_out: nothing trains on it.
        weight: in training; a negative one means that less is better.
        first, last, best: means of evaluations.
        best_at: iterations done at the best one.
        rise: last − first; None with fewer than two evaluations.
        error: its standard error over prompts; None for fewer than two prompts.
    """

    name: str
    held_out: bool
    weight: float
    first: float
    last: float
    best: float
    best_at: int
    rise: float | None
    error: float | None

    @property
    def direction(self) -> Literal["up", "down", "level"]:
        """Whether it changed by more than two standard errors, for the better (up) or the worse."""
        if self.rise is None or self.error is None or not abs(self.rise) > SIGNIFICANT * self.error:
            return "level"
        return "up" if (self.rise > 0) == (self.weight >= 0) else "down"


@dataclass(frozen=True)
class Warned:
    """One monitor's findings over the run.

    Attributes:
        key: the number's name; ``monitor``: its limit; ``level``: the worst.
        iterations: at which there was a finding.
        text: of the last one.
    """

    key: str
    monitor: str
    level: str
    iterations: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Summary:
    """A run in a few numbers.

    Attributes:
        status: ``finished``, ``interrupted``, ``stopped`` by a monitor, ``failed``, or ``open``: still running, or
            ended without a word.
        text: what was said at the end.
        done, planned: iterations.
        changes: a reward each.
        warned: a number each.
        seconds: by phase, over the iterations of the log; ``evaluation`` beside them.
        loop_share: share of the iterations' time that is the loop's own, costly monitors apart.
    """

    status: str
    text: str
    done: int
    planned: int | None
    changes: tuple[Change, ...]
    warned: tuple[Warned, ...]
    seconds: Mapping[str, float]
    loop_share: float | None

    @property
    def grade(self) -> Literal["good", "warn", "bad"]:
        """Good: finished, a trained reward rose, no held-out one fell, and no number is beyond a limit at the end."""
        if self.status in ("failed", "stopped"):
            return "bad"
        trained = [c for c in self.changes if not c.held_out]
        hacked = any(c.direction == "down" for c in self.changes)
        rose = any(c.direction == "up" for c in trained)
        last = self.done - 1
        active = any(at >= last for w in self.warned for at in w.iterations[-1:])
        return "good" if self.status == "finished" and rose and not hacked and not active else "warn"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what is not finite is None."""
        found = asdict(self) | {"grade": self.grade}
        for entry, change in zip(found["changes"], self.changes, strict=True):
            entry["direction"] = change.direction
        return {key: finite(value) for key, value in found.items()}


def finite(value: Any) -> Any:
    """``value`` with what JSON cannot hold replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    return [finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def number(value: Any) -> float:
    """A value of the log; null is NaN."""
    return math.nan if value is None else float(value)


def paired_rise(first: Mapping[str, Any], last: Mapping[str, Any], name: str) -> tuple[float, float | None]:
    """Mean difference of the prompts' means, and its standard error over prompts."""
    before = {row["id"]: number(row["rewards"].get(name)) for row in first["prompts"]}
    pairs = [(before[row["id"]], number(row["rewards"].get(name))) for row in last["prompts"] if row["id"] in before]
    gaps = [b - a for a, b in pairs]
    if not gaps:
        return math.nan, None
    mean = math.fsum(gaps) / len(gaps)
    if len(gaps) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1) / len(gaps))


def changes_of(history: History) -> tuple[Change, ...]:
    """Every reward of the evaluations."""
    found = []
    for name in history.names("evaluation/", "/mean", "evaluation"):
        at, values = history.curve(f"evaluation/{name}/mean", "evaluation")
        records = [r for r in history.evaluations if f"evaluation/{name}/mean" in r["metrics"]]
        known = [i for i, value in enumerate(values) if math.isfinite(value)]
        weight = float(records[-1].get("trained", {}).get(name, 1.0))
        best = max(known, key=lambda i: values[i] * weight) if known else 0
        rise, error = paired_rise(records[0], records[-1], name) if len(records) > 1 else (None, None)
        held = name in records[-1].get("held_out", ())
        found.append(
            Change(
                name, held, weight, float(values[0]), float(values[-1]), float(values[best]), int(at[best]), rise, error
            )
        )
    return tuple(sorted(found, key=lambda change: change.held_out))


def warned_of(history: History) -> tuple[Warned, ...]:
    """All findings, by number; an evaluation after n iterations counts to iteration n − 1."""
    collected: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for record in history.records:
        at = record["iteration"] - (record["kind"] == "evaluation")
        for finding in record.get("findings", ()):
            collected.setdefault(finding["key"], []).append((at, finding))
    return tuple(
        Warned(
            key,
            found[-1][1]["monitor"],
            "stop" if any(f["level"] == "stop" for _, f in found) else "warn",
            tuple(at for at, _ in found),
            found[-1][1]["text"],
        )
        for key, found in collected.items()
    )


def seconds_of(history: History) -> dict[str, float]:
    """Seconds by phase over all iterations of the log, and of the evaluations."""
    total: dict[str, float] = {}
    for record in history.iterations:
        for phase, value in record.get("seconds", {}).items():
            total[phase] = total.get(phase, 0.0) + number(value)
    if history.evaluations:
        total["evaluation"] = math.fsum(number(record.get("seconds")) for record in history.evaluations)
    return total


def loop_share(seconds: Mapping[str, float]) -> float | None:
    """The loop's own share of rollout, reward, update and itself."""
    own = math.fsum(seconds.get(phase, 0.0) for phase in LOOP)
    work = math.fsum(seconds.get(phase, 0.0) for phase in ("rollout", "reward", "update"))
    return own / (own + work) if own + work > 0.0 else None


def last_end(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The end of the last process; None where it has none."""
    return records[-1] if records and records[-1]["kind"] == "end" else None


def summarise(history: History) -> Summary:
    """The run in a few numbers."""
    end, seconds = last_end(history.records), seconds_of(history)
    return Summary(
        status="open" if end is None else str(end["reason"]),
        text="" if end is None else str(end.get("text", "")),
        done=history.done,
        planned=history.planned,
        changes=changes_of(history),
        warned=warned_of(history),
        seconds=seconds,
        loop_share=loop_share(seconds),
    )
