"""Trace checks of moving windows, singular sampling and granularities: statements about several records."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.conformance.checks.base import expect, needs, rounding_hint, some, trace_check
from branchgrpo.conformance.checks.trace_normalization import off, rounding, unclipped
from branchgrpo.conformance.clauses import clause
from branchgrpo.conformance.record import Record
from branchgrpo.reference.windows import WindowSchedule

Member = tuple[int, int]
WINDOW_ROLE = 4
"""Code of the role WINDOW in a key (NOISE-4)."""


def positions(window: WindowSchedule) -> list[int]:
    """First steps of the windows: multiples of the stride, and the last full-size window (WIN-2)."""
    final = window.last - window.size + 1
    return [*range(0, final, window.stride), final]


def periods(window: WindowSchedule) -> list[int]:
    """Iterations at each position (WIN-5)."""
    found = []
    for start in positions(window):
        factor = 1.0
        if window.decay == "linear":
            factor = 1 - start / (window.last + 1)
        elif window.decay == "exponential":
            factor = math.exp(-window.rate * max(0, start - window.threshold))
        found.append(max(1, round(window.period * factor)))
    return found


def progressive_window(window: WindowSchedule, iteration: int) -> set[int]:
    """The window of an iteration that visits the positions in order (WIN-4)."""
    timeline = [start for start, count in zip(positions(window), periods(window), strict=True) for _ in range(count)]
    if iteration >= len(timeline) and window.end == "stop":
        return set()
    index = iteration % len(timeline) if window.end == "wrap" else min(iteration, len(timeline) - 1)
    return set(range(timeline[index], timeline[index] + window.size))


def random_window(window: WindowSchedule, iteration: int, seed: int) -> set[int]:
    """The window that the run's seed draws for an iteration (WIN-6)."""
    counter = np.array([0, 0, WINDOW_ROLE << 56, 0], dtype=np.uint64)
    key = np.array([seed, iteration // window.period], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
    start = positions(window)[int(generator.integers(len(positions(window))))]
    return set(range(start, start + window.size))


def windowed(records: Sequence[Record]) -> list[tuple[int, Record, WindowSchedule]]:
    """Records whose plan a window schedule gave."""
    found = [(r, record, record.window) for r, record in enumerate(records) if record.window is not None]
    return some(found, "a moving window")


def free_steps(record: Record) -> set[int]:
    """Stochastic steps that are no splits of a tree that keeps its splits (WIN-1, WIN-3)."""
    lone = len(record.plan.splits) == 1 and math.isinf(record.plan.spreads[record.plan.splits[0]])
    return set(record.plan.stochastic_steps) - (set() if lone else set(record.plan.splits))


@trace_check
@clause("WIN-1")
def only_one_window_is_stochastic(records: Sequence[Record]) -> None:
    """Outside splits the stochastic steps fit into one window."""
    for r, record, window in windowed(records):
        steps = free_steps(record)
        width = max(steps) - min(steps) + 1 if steps else 0
        where = f"record {r}, iteration {record.iteration}"
        expect(width <= window.size, f"{where}: {sorted(steps)} span {width} steps, a window has {window.size}")


@trace_check
@clause("WIN-2")
def windows_are_full_size(records: Sequence[Record]) -> None:
    """Every window holds its whole number of consecutive steps, at the end of the range too."""
    for r, record, window in windowed(records):
        if window.end == "stop" and not progressive_window(window, record.iteration):
            continue
        steps = set(record.plan.stochastic_steps)
        whole = any(
            steps.issuperset(range(start, start + window.size)) for start in range(window.last - window.size + 2)
        )
        where = f"record {r}, iteration {record.iteration}"
        expect(whole, f"{where}: stochastic steps {sorted(steps)} hold no window of {window.size}")


def compare_window(r: int, record: Record, wanted: set[int]) -> None:
    """The stochastic steps are the window's and the splits'."""
    found = set(record.plan.stochastic_steps)
    expect(
        free_steps(record) <= wanted <= found,
        f"record {r}, iteration {record.iteration}: stochastic steps {sorted(found)}, the window is {sorted(wanted)}",
    )


@trace_check
@clause("WIN-4")
def windows_follow_the_iteration(records: Sequence[Record]) -> None:
    """A progressive window of constant period is where the iteration puts it."""
    found = [x for x in windowed(records) if x[2].order == "progressive" and x[2].decay == "constant"]
    for r, record, window in some(found, "a progressive window of constant period"):
        compare_window(r, record, progressive_window(window, record.iteration))


@trace_check
@clause("WIN-5")
def decaying_periods_follow_their_formula(records: Sequence[Record]) -> None:
    """A progressive window whose period decays is where the formula puts it."""
    found = [x for x in windowed(records) if x[2].order == "progressive" and x[2].decay != "constant"]
    for r, record, window in some(found, "a progressive window of decaying period"):
        compare_window(r, record, progressive_window(window, record.iteration))


@trace_check
@clause("WIN-6")
def random_windows_follow_the_seed(records: Sequence[Record]) -> None:
    """A random window is the one that the run's seed draws, on every rank."""
    found = [(r, x, w, x.seed) for r, x, w in windowed(records) if w.order == "random" and x.seed is not None]
    for r, record, window, seed in some(found, "a random window and its seed"):
        compare_window(r, record, random_window(window, record.iteration, seed))


def members(records: Sequence[Record]) -> list[tuple[int, Record, Member]]:
    """Records of a plan family."""
    found = [(r, record, record.member) for r, record in enumerate(records) if record.member is not None]
    return some(found, "a member of a plan family")


@trace_check
@clause("SING-2")
def only_step_k_is_stochastic(records: Sequence[Record]) -> None:
    """A member has noise at step k alone, where it splits into its group."""
    for r, record, (k, _) in members(records):
        found = record.plan.stochastic_steps
        expect(found == (k,), f"record {r}: stochastic steps {found}, member of k = {k}")
        expect(record.plan.splits == (k,), f"record {r}: splits {record.plan.splits}, member of k = {k}")


def siblings(records: Sequence[Record]) -> Iterator[tuple[int, Record, int, Record, int]]:
    """Pairs of members of one iteration, with the depth down to which they share their states."""
    found = members(records)
    for i, (r, record, (k, _)) in enumerate(found):
        for q, other, (n, _) in found[:i]:
            if record.iteration == other.iteration and record.prompts == other.prompts:
                yield q, other, r, record, k + 1 if k == n else min(k, n)


@trace_check
@clause("SING-3")
def members_share_anchor_and_children(records: Sequence[Record]) -> None:
    """Members of one iteration have the same anchor, and for one k the same children."""
    for q, other, r, record, last in some(list(siblings(records)), "two members of one iteration"):
        for depth in range(last + 1):
            same = torch.equal(other.levels["states"][depth], record.levels["states"][depth])
            expect(
                same, f"records {q} and {r}, members {other.member} and {record.member}: other states at depth {depth}"
            )


def continuations(records: Sequence[Record]) -> list[tuple[int, Record, Member, tuple[float, ...]]]:
    """Members with λ > 1, and the full schedule from the member of λ = 1 of the same iteration."""
    full = {(record.iteration, k): record.plan.sigmas for _, record, (k, g) in members(records) if g == 1}
    found = [
        (r, record, (k, g), full[record.iteration, k])
        for r, record, (k, g) in members(records)
        if g > 1 and (record.iteration, k) in full
    ]
    return some(found, "a member of λ > 1 beside the one of λ = 1")


@trace_check
@clause("GRAN-1")
def continuations_visit_their_levels(records: Sequence[Record]) -> None:
    """A continuation visits k + 1, k + 2 and every λ-th level after it, or ends on the stride, and then σ = 0."""
    for r, record, (k, g), sigmas in continuations(records):
        steps = len(sigmas) - 1
        start = [k + 1, *range(k + 2, steps, g), steps]
        end = [k + 1, *(i for i in range(k + 2, steps + 1) if (steps - i) % g == 0)]
        found = record.plan.sigmas[k + 1 :]
        allowed = [tuple(sigmas[i] for i in indices) for indices in (start, end)]
        expect(found in allowed, f"record {r}: levels {found} after step {k}, granularity {g} visits {allowed[0]}")


def integrated(records: Sequence[Record]) -> list[tuple[int, Record, int, Float64[Tensor, "prompts _"]]]:
    """For each k the record that carries advantages, with the sum over Λ of the unclipped scores."""
    found = []
    for r, record in needs(records, "advantages", "values"):
        if record.member is None:
            continue
        k = record.member[0]
        parts = [
            unclipped(other, k + 1)
            for other in records
            if other.member is not None and other.member[0] == k and other.iteration == record.iteration
        ]
        found.append((r, record, k + 1, torch.stack(parts).sum(dim=0)))
    return some(found, "a trained member of a plan family")


@trace_check
@clause("GRAN-4")
def advantages_sum_over_granularities(records: Sequence[Record]) -> None:
    """Where no clip binds, a child's advantage is the sum over λ of its within-group scores."""
    for r, record, depth, wanted in integrated(records):
        free = wanted.abs() <= record.normalization.clip
        worst = off(record.levels["advantages"][depth][free], wanted[free])
        expect(
            worst <= rounding(record, depth),
            f"record {r}, member {record.member}: advantages off by {worst:.3g}{rounding_hint(worst)}",
        )


@trace_check
@clause("GRAN-5")
def the_sum_over_granularities_is_clipped_once(records: Sequence[Record]) -> None:
    """The sum over λ is clipped to ±A_max, its terms are not."""
    seen = 0
    for r, record, depth, wanted in integrated(records):
        bound = record.normalization.clip
        seen += int((wanted.abs() > bound).sum())
        worst = off(record.levels["advantages"][depth], wanted.clamp(-bound, bound))
        expect(
            worst <= rounding(record, depth),
            f"record {r}, member {record.member}: not the clipped sum, off by {worst:.3g}{rounding_hint(worst)}",
        )
    some([seen] if seen else [], "a sum over granularities that the clip binds")
