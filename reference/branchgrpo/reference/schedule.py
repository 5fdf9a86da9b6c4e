"""Noise-level schedules σ_0 = 1 > σ_1 > … > σ_T = 0 (spec: schedule)."""

import math
from collections.abc import Sequence

from branchgrpo.reference.errors import PlanError, is_integer


def shift_sigma(sigma: float, shift: float) -> float:
    """Shift one noise level: σ ← s·σ / (1 + (s − 1)·σ).

    Clause: SCHED-2.  Source: SD3 (arXiv 2403.03206) Eq. 23; s = 3 in both papers' image runs.

    Args:
        sigma: σ in [0, 1].
        shift: s > 0; 1 leaves σ unchanged.

    Returns:
        The shifted level, in [0, 1]; 0 and 1 are fixed points.
    """
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def shifted_schedule(steps: int, shift: float = 3.0) -> tuple[float, ...]:
    """The shift applied once to ``linspace(1, 0, T + 1)``.

    Clause: SCHED-1, SCHED-2.  Source: BranchGRPO and G²RPO, experimental settings.

    Args:
        steps: T ≥ 1 denoising steps.
        shift: s > 0.

    Returns:
        T + 1 noise levels, strictly decreasing from exactly 1 to exactly 0.

    Raises:
        PlanError: T < 1, or a shift that is not positive and finite.
    """
    if not is_integer(steps) or steps < 1:
        raise PlanError("steps", steps, "an integer ≥ 1")
    if not (math.isfinite(shift) and shift > 0):
        raise PlanError("shift", shift, "positive and finite")
    return tuple(shift_sigma((steps - i) / steps, shift) for i in range(steps + 1))


def validate_schedule(sigmas: Sequence[float]) -> None:
    """Refuse a schedule that is not strictly decreasing from 1 to 0.

    Clause: SCHED-1, ERR-2.

    Raises:
        PlanError: names the first level at fault.
    """
    if len(sigmas) < 2:
        raise PlanError("sigmas", tuple(sigmas), "at least two noise levels, 1 and 0")
    if sigmas[0] != 1.0:
        raise PlanError("sigmas[0]", sigmas[0], "exactly 1")
    if sigmas[-1] != 0.0:
        raise PlanError(f"sigmas[{len(sigmas) - 1}]", sigmas[-1], "exactly 0")
    for i in range(1, len(sigmas)):
        if not sigmas[i] < sigmas[i - 1]:
            raise PlanError(f"sigmas[{i}]", sigmas[i], f"less than sigmas[{i - 1}] = {sigmas[i - 1]!r}")
