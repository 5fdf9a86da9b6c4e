"""Sample size from a discrepancy: the inverse of ``detectable``."""

from collections.abc import Callable

from branchgrpo.reference.errors import OptionError


def sample_size(detectable: Callable[[int], float], discrepancy: float, minimum: int = 1) -> int:
    """The smallest n ≥ ``minimum`` with detectable(n) ≤ discrepancy, by doubling and bisection.

    Args:
        detectable: of one test, falling in n.
        discrepancy: > 0.
        minimum: smallest sample that the test takes.
    """
    if not discrepancy > 0.0:
        raise OptionError("discrepancy", discrepancy, "> 0")
    high = max(minimum, 1)
    while detectable(high) > discrepancy:
        high *= 2
    low = max(minimum, high // 2)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if detectable(middle) <= discrepancy else (middle + 1, high)
    return high
