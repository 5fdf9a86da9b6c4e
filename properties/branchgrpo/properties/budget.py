"""One false-alarm budget for a whole run, and how it is split."""

from collections.abc import Sequence

from branchgrpo.reference.errors import OptionError

FALSE_ALARM = 1e-6
"""Probability that a run over correct code fails at all."""

SLOTS = 200
"""p-values that a run may judge; a run that judges more fails, because its budget is then no longer kept."""

ALPHA = FALSE_ALARM / SLOTS
"""Bonferroni: the level of every single p-value."""

POWER = 0.999
"""Power at which the detectable discrepancy of a check is stated."""


def check_p_values(p_values: Sequence[float]) -> None:
    """Raise ``OptionError`` unless there is at least one p-value and each is in [0, 1]."""
    if not p_values or not all(0.0 <= p <= 1.0 for p in p_values):
        raise OptionError("p_values", list(p_values), "at least one, each in [0, 1]")


def bonferroni(p_values: Sequence[float]) -> float:
    """min(1, m · min p): one p-value for m of them, however they depend on each other.  Source: Bonferroni."""
    check_p_values(p_values)
    return min(1.0, len(p_values) * min(p_values))


def holm(p_values: Sequence[float], level: float, total: int | None = None) -> list[bool]:
    """Which hypotheses Holm's step-down rejects at family-wise ``level``, in the order given.

    Source: Holm (1979).  The i-th smallest p (from 0) is compared with level/(total − i), until one is larger.

    Args:
        p_values: one a hypothesis.
        level: probability of any false rejection, in (0, 1).
        total: hypotheses in the family, at least ``len(p_values)``: those of a run that were not reached count too.
    """
    check_p_values(p_values)
    family = len(p_values) if total is None else total
    if not 0.0 < level < 1.0:
        raise OptionError("level", level, "in (0, 1)")
    if family < len(p_values):
        raise OptionError("total", family, f"at least {len(p_values)}, the p-values given")
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[index] > level / (family - rank):
            break
        rejected[index] = True
    return rejected
