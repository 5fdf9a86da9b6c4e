"""Denoiser calls of a plan family, ours and as public code makes them (spec: singular, granularity)."""

from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.granularity import distinct_calls


def anchor_calls(family: PlanFamily) -> int:
    """Calls of the anchors, stopped at max M: one for each of x_0 … x_{max M}.  Clause: SING-4, DIV-G6."""
    return family.roots * (family.ks[-1] + 1)


def continuation_calls(family: PlanFamily) -> int:
    """Calls of all continuations when equal inputs are called once; and their states, all but the leaves.

    Clause: GRAN-3.
    """
    calls = [distinct_calls([family.continuation(k, g) for g in family.granularities]) for k in family.ks]
    return family.roots * family.group * sum(calls)


def public_calls(family: PlanFamily) -> int:
    """Calls that the public G²RPO code makes for the same family, its early-stopping schedules included.

    Clause: GRAN-3, DIV-G1, DIV-G6.  The anchor runs to the end; each child calls x_k again, once for all granularities;
    granularity λ then calls k + 1 and every λ-th index from k + 2 that a whole stride still fits behind.
    """
    steps, total = family.steps, family.steps
    for k in family.ks:
        per_child = 1 + sum(1 + max(0, steps - k - 2) // granularity for granularity in family.granularities)
        total += family.group * per_child
    return family.roots * total
