"""CPU time of two sides, measured in interleaved pairs."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Paired:
    """Median CPU seconds of two sides and the median of their pairwise ratios."""

    one: float
    other: float
    ratio: float
    low: float
    high: float
    pairs: int

    def summary(self) -> dict[str, float]:
        """For the results file; ``low`` and ``high`` are the ratio's quartiles."""
        parts = {"ratio": self.ratio, "low": self.low, "high": self.high, "seconds": self.one, "bare": self.other}
        return {name: float(f"{value:.4g}") for name, value in parts.items()} | {"pairs": self.pairs}


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of the process during one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def paired(one: Callable[[], object], other: Callable[[], object], pairs: int) -> Paired:
    """Both sides in turn, the order changing from pair to pair; one unmeasured pair first."""
    one(), other()
    times: list[tuple[float, float]] = []
    for i in range(pairs):
        if i % 2:
            second = cpu_seconds(other)
            times.append((cpu_seconds(one), second))
        else:
            first = cpu_seconds(one)
            times.append((first, cpu_seconds(other)))
    ratios = sorted(a / b for a, b in times)
    quarter = len(ratios) // 4
    return Paired(
        median(a for a, _ in times),
        median(b for _, b in times),
        median(ratios),
        ratios[quarter],
        ratios[-1 - quarter],
        pairs,
    )


def settled(work: Callable[[], object], repeats: int) -> float:
    """Median CPU time of some calls, one unmeasured call first."""
    work()
    return median(cpu_seconds(work) for _ in range(repeats))
