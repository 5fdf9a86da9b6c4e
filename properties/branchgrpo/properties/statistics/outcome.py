"""What a statistical test returns: the assertion, the discrepancy it detects, the sample size."""

from dataclasses import dataclass

from jaxtyping import Float64
from numpy import isfinite, ndarray

from branchgrpo.properties.findings import Finding
from branchgrpo.reference.errors import InputError


@dataclass(frozen=True)
class Outcome:
    """A p-value with what makes it meaningful.

    Attributes:
        kind: which test, as a word.
        n: sample size.
        statistic: estimate of the quantity tested.
        p: two-sided p-value, exact or conservative.
        detectable: smallest discrepancy found with power ``POWER`` at level ``alpha``.
        alpha: the level.
    """

    kind: str
    n: int
    statistic: float
    p: float
    detectable: float
    alpha: float

    def finding(self, name: str, clause: str, seconds: float = 0.0) -> Finding:
        """The row of this test in the table."""
        title = f"{name}: {self.kind}"
        return Finding(title, clause, self.n, self.statistic, self.p, self.detectable, None, self.alpha, seconds)


def two_sided(lower: float, upper: float) -> float:
    """min(1, 2·min(P(X ≤ x), P(X ≥ x)))."""
    return min(1.0, 2.0 * min(lower, upper))


def check_sample(x: Float64[ndarray, "*shape"], minimum: int) -> None:
    """Refuse a sample that is too small or not finite.

    Raises:
        InputError: names the size or says what was found.
    """
    if x.size < minimum:
        raise InputError("sample size", x.size, f"≥ {minimum}")
    if not isfinite(x).all():
        raise InputError("sample", "NaN or ±inf", "finite")
