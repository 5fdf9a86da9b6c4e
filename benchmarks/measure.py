"""CPU time of several sides, measured in interleaved rounds."""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Paired:
    """Median CPU seconds of two sides, and the median and quartiles of their ratio within a round."""

    one: float
    other: float
    ratio: float
    low: float
    high: float
    pairs: int

    @classmethod
    def of(cls, times: Sequence[tuple[float, float]]) -> "Paired":
        """From the times of every round."""
        ratios = sorted(a / b for a, b in times)
        quarter = len(ratios) // 4
        ones, others = (median(column) for column in zip(*times, strict=True))
        return cls(ones, others, median(ratios), ratios[quarter], ratios[-1 - quarter], len(times))

    def summary(self) -> dict[str, float]:
        """For the results file; ``low`` and ``high`` are the ratio's quartiles."""
        parts = {"ratio": self.ratio, "low": self.low, "high": self.high, "seconds": self.one, "bare": self.other}
        return {name: float(f"{value:.4g}") for name, value in parts.items()} | {"pairs": self.pairs}


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Numbers of glibc's ``mallopt``."""


def keep_freed_memory() -> bool:
    """Have freed memory stay with the process, as a device's caching allocator does; whether the C library can.

    glibc returns the denoiser's larger temporaries to the system and faults their pages in again at the next call, on
    either side, by chance now more and now less often: a tenth of a call's time at 1,024 tokens, and ±5 % of a ratio.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of the process during one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def interleaved(sides: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """CPU times of all sides, round by round, a later side first in each; one unmeasured round before."""
    for side in sides:
        side()
    times = []
    for first in range(rounds):
        order = [(first + i) % len(sides) for i in range(len(sides))]
        found = {index: cpu_seconds(sides[index]) for index in order}
        times.append([found[index] for index in range(len(sides))])
    return times


def paired(one: Callable[[], object], other: Callable[[], object], pairs: int) -> Paired:
    """Both sides in turn, the order changing from pair to pair."""
    return Paired.of([(a, b) for a, b in interleaved([one, other], pairs)])


def settled(work: Callable[[], object], repeats: int) -> float:
    """Median CPU time of some calls, one unmeasured call first."""
    work()
    return median(cpu_seconds(work) for _ in range(repeats))
