"""Granular schedules: which noise levels a continuation visits (spec: granularity)."""

from collections.abc import Sequence
from typing import Literal

from branchgrpo.reference.errors import PlanError, is_integer

StrideAnchor = Literal["start", "end"]


def granular_indices(start: int, steps: int, granularity: int, anchor: StrideAnchor = "start") -> tuple[int, ...]:
    """Indices into the full schedule that the continuation from index k + 1 visits, from k + 1 to T.

    Clause: GRAN-1, GRAN-2.  Anchored at the start: k+1, k+2, k+2+λ, k+2+2λ, …, T, with a short last jump where the
    stride skips T.  Anchored at the end: k+1, then every index ≡ T (mod λ), with an irregular first jump.
    Source: G²RPO §3.3; ends at σ = 0 always, where public code can stop above it (DIV-G1); the anchor: DIV-P10.

    Args:
        start: k + 1 in 1..T.
        steps: T.
        granularity: λ ≥ 1.
        anchor: where the stride is anchored.
    """
    if not is_integer(granularity) or granularity < 1:
        raise PlanError("granularity", granularity, "an integer ≥ 1")
    if not is_integer(start) or not 1 <= start <= steps:
        raise PlanError("start", start, f"an integer in 1..{steps}")
    if start == steps:
        return (steps,)
    if anchor == "start":
        return (start, *range(start + 1, steps, granularity), steps)
    return (start, *reversed(range(steps, start, -granularity)))


def distinct_calls(continuations: Sequence[Sequence[int]]) -> int:
    """Denoiser calls of several continuations from one child when equal inputs are called once.

    Clause: GRAN-3.  Two continuations share the call at an index while all indices before it agree too.
    """
    return len({tuple(c[: i + 1]) for c in continuations for i in range(len(c) - 1)})
