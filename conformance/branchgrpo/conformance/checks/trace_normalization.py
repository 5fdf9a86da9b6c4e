"""Trace checks of normalization, recomputed from the trace's own values."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.conformance.checks.base import expect, needs, rounding_hint, some, trace_check
from branchgrpo.conformance.checks.levels import by_tree
from branchgrpo.conformance.checks.limits import ADVANTAGE, CONDITION, SCOPE
from branchgrpo.conformance.clauses import clause
from branchgrpo.conformance.record import Record

EQUAL = 2.0**-40
"""Relative spread up to which values are equal (NORM-4)."""


def grouped(record: Record, level: Float64[Tensor, "prompts nodes"], scope: str) -> Float64[Tensor, "groups members"]:
    """A level's values by group of a scope, in the order of prompts and roots."""
    groups = {"tree": len(record.prompts) * record.plan.roots, "prompt": len(record.prompts), "batch": 1}[scope]
    return level.reshape(groups, -1)


def prompt_groups(
    record: Record, level: Float64[Tensor, "prompts nodes"], scope: str
) -> list[Float64[Tensor, "members"]]:
    """For each (prompt, root) the values of its group; prompts of one id are one prompt (NORM-2)."""
    roots, ids = record.plan.roots, [prompt.id for prompt in record.prompts]
    if scope == "prompt" and len(set(ids)) < len(ids):
        rows = [torch.cat([level[i] for i, other in enumerate(ids) if other == own]) for own in ids]
        return [row for row in rows for _ in range(roots)]
    groups = grouped(record, level, scope)
    return [group for group in groups for _ in range(len(ids) * roots // len(groups))]


def is_equal(values: Float64[Tensor, "members"]) -> bool:
    """Fewer than two values, or a spread that is rounding (NORM-4)."""
    return len(values) < 2 or bool(values.max() - values.min() <= EQUAL * values.abs().max())


def z_scores(record: Record, level: Float64[Tensor, "prompts nodes"]) -> Float64[Tensor, "prompts nodes"]:
    """Depth-wise advantages of one reward at one depth (NORM-1 … NORM-4)."""
    options = record.normalization
    means = prompt_groups(record, level, options.mean_scope)
    spreads = prompt_groups(record, level, options.std_scope)
    trees = by_tree(record, level).flatten(0, 1)
    rows = [
        torch.zeros_like(own)
        if is_equal(mean) or is_equal(spread)
        else (own - mean.mean()) / (spread.std(correction=int(options.bessel)) + options.eps)
        for own, mean, spread in zip(trees, means, spreads, strict=True)
    ]
    return torch.stack(rows).reshape(level.shape)


def unclipped(record: Record, depth: int) -> Float64[Tensor, "prompts nodes"]:
    """Advantages of a depth before clipping, from the dumped values (NORM-5)."""
    values = record.levels["values"][depth]
    weights = weights_of(record)
    if record.normalization.order == "sum_then_normalize":
        return z_scores(record, values @ weights)
    columns = [z_scores(record, values[..., m]) for m in range(len(weights))]
    return torch.stack(columns, dim=-1) @ weights


def rounding(record: Record, depth: int) -> float:
    """How far a depth's advantages may be off in units of max(1, |A|): float64's rounding times their condition.

    The condition is that of the worst group: the largest |value| over the std that divides it.
    """
    values = record.levels["values"][depth]
    worst = 0.0
    for level in [*values.unbind(-1), values @ weights_of(record)]:
        for group in prompt_groups(record, level, record.normalization.std_scope):
            if not is_equal(group):
                worst = max(worst, float(level.abs().max() / group.std(correction=0)))
    return ADVANTAGE + CONDITION * worst


def weights_of(record: Record) -> Float64[Tensor, "models"]:
    """Weights of the reward models."""
    return torch.tensor([model.weight for model in record.reward_models], dtype=torch.float64)


def off(found: Float64[Tensor, "*shape"], wanted: Float64[Tensor, "*shape"]) -> float:
    """The largest error of advantages, in units of max(1, |A|)."""
    return float(((found - wanted).abs() / wanted.abs().clamp(min=1.0)).max()) if wanted.numel() else 0.0


@trace_check
@clause("NORM-1")
def advantages_are_depth_wise_scores(records: Sequence[Record]) -> None:
    """Advantages are the declared z-scores of the dumped values, depth by depth, before any clipping."""
    plain = [(r, record) for r, record in needs(records, "values", "advantages") if record.member is None]
    for r, record in some(plain, "values and advantages of a plan"):
        for depth, advantages in record.levels["advantages"].items():
            wanted, bound = unclipped(record, depth), record.normalization.clip
            free = wanted.abs() <= bound
            error = off(advantages[free], wanted[free])
            expect(
                error <= rounding(record, depth),
                f"record {r}, depth {depth}: advantages off by {error:.3g}{rounding_hint(error)}",
            )


@dataclass(frozen=True)
class Scale:
    """What a set of nodes with one mean and one std was divided by: the slope of A against the value.

    Attributes:
        where: record, depth and tree.
        slope: as found.
        declared, other: of the std scope's std with the declared denominator, and with the other one.
        foreign: of both denominators about the mean scope's mean; where the scopes are one, none.
        slack: what float64's rounding may change, relative to the slope.
    """

    where: str
    slope: float
    declared: float
    other: float
    foreign: tuple[float, ...]
    slack: float

    def fits(self, candidate: float, limit: float = SCOPE) -> bool:
        """Whether the slope is that of a candidate; a group of thousands could not tell denominators apart."""
        return abs(self.slope - candidate) <= (limit + self.slack) * abs(candidate)

    @property
    def is_whole(self) -> bool:
        """Whether the slope is a std of the std scope's nodes, by any denominator and about any mean."""
        return any(self.fits(candidate) for candidate in (self.declared, self.other, *self.foreign))


def plain_records(records: Sequence[Record]) -> list[tuple[int, Record]]:
    """Records of plans with one reward model whose advantages no clip binds."""
    found = [
        (r, record)
        for r, record in needs(records, "values", "advantages")
        if record.member is None
        and len(record.reward_models) == 1
        and max(float(level.abs().max()) for level in record.levels["advantages"].values()) < record.normalization.clip
    ]
    return some(found, "unclipped advantages of one reward model")


def scales(r: int, record: Record) -> Iterator[Scale]:
    """The slope of every set of nodes that share mean and std and differ."""
    options = record.normalization
    shared = "tree" if "tree" in (options.mean_scope, options.std_scope) else "prompt"
    for depth, advantages in record.levels["advantages"].items():
        values = record.levels["values"][depth][..., 0]
        groups = [prompt_groups(record, values, scope) for scope in (shared, options.mean_scope, options.std_scope)]
        found = prompt_groups(record, advantages, shared)
        for tree, (own, mean, group) in enumerate(zip(*groups, strict=True)):
            if not (is_equal(own) or is_equal(mean) or is_equal(group)):
                yield scale_of(f"record {r}, depth {depth}, tree {tree}", record, (own, found[tree]), mean, group)


def scale_of(where: str, record: Record, pairs: tuple[Tensor, Tensor], mean: Tensor, group: Tensor) -> Scale:
    """The slope between the extremes of ``pairs``, values and advantages, and what it may have come from."""
    options, (values, advantages) = record.normalization, pairs
    weight, low, high = record.reward_models[0].weight, int(values.argmin()), int(values.argmax())
    spread = float(values[high] - values[low])
    slope = float(advantages[high] - advantages[low]) / spread

    def by(squares: Tensor, correction: int) -> float:
        return weight / (math.sqrt(float(squares.sum()) / (len(squares) - correction)) + options.eps)

    squares, strange = (group - group.mean()).square(), (group - mean.mean()).square()
    first = int(options.bessel)
    foreign = tuple(by(strange, c) for c in (first, 1 - first)) if options.mean_scope != options.std_scope else ()
    condition = float(group.abs().max()) / min(spread, float(group.std(correction=0)))
    return Scale(where, slope, by(squares, first), by(squares, 1 - first), foreign, CONDITION * condition)


@trace_check
@clause("NORM-2")
def groups_are_whole(records: Sequence[Record]) -> None:
    """Advantages are centred over the whole mean scope and scaled by the std of the whole std scope."""
    for r, record in plain_records(records):
        for depth, advantages in record.levels["advantages"].items():
            for group in prompt_groups(record, advantages, record.normalization.mean_scope):
                centre = abs(float(group.mean()))
                expect(centre <= SCOPE, f"record {r}, depth {depth}: a group's advantages have the mean {centre:.3g}")
        for scale in scales(r, record):
            wanted = f"{scale.declared:.6g}, or {scale.other:.6g} by the other denominator"
            expect(
                scale.is_whole, f"{scale.where}: advantages scaled by {scale.slope:.6g}, the std scope's is {wanted}"
            )


@trace_check
@clause("NORM-3")
def the_std_has_the_declared_denominator(records: Sequence[Record]) -> None:
    """The std divides by n − 1 or by n, as declared, and is about the std scope's own mean, in float64."""
    found = [(record, scale) for r, record in plain_records(records) for scale in scales(r, record)]
    for record, scale in some(found, "a group with a spread"):
        if scale.fits(scale.declared, ADVANTAGE):
            continue
        declared = "n − 1" if record.normalization.bessel else "n"
        error = abs(scale.slope / scale.declared - 1)
        hint = rounding_hint(error)
        close = scale.fits(scale.declared)
        expect(not close, f"{scale.where}: the std is off by {error:.3g}{hint}, it is to be in float64")
        expect(not scale.fits(scale.other), f"{scale.where}: divided by the other denominator, {declared} was declared")
        own = not any(scale.fits(candidate) for candidate in scale.foreign)
        expect(own, f"{scale.where}: the std is about the mean scope's mean, not about the std scope's own")


@trace_check
@clause("NORM-4")
def equal_values_have_no_advantage(records: Sequence[Record]) -> None:
    """Where values are equal to rounding, advantages are exactly 0; nowhere are they huge."""
    plain = [(r, record) for r, record in needs(records, "values", "advantages") if record.member is None]
    seen = 0
    for r, record in some(plain, "values and advantages of a plan"):
        for depth, advantages in record.levels["advantages"].items():
            wanted = unclipped(record, depth)
            zero = wanted == 0
            seen += int(zero.sum())
            expect(bool((advantages[zero] == 0).all()), f"record {r}, depth {depth}: equal values, advantages not 0")
    some([seen] if seen else [], "a set of equal values")


@trace_check
@clause("NORM-6")
def advantages_are_clipped_once(records: Sequence[Record]) -> None:
    """The weighted sum is clipped to ±A_max, and nothing before it is."""
    plain = [(r, record) for r, record in needs(records, "values", "advantages") if record.member is None]
    seen = 0
    for r, record in some(plain, "values and advantages of a plan"):
        bound = record.normalization.clip
        for depth, advantages in record.levels["advantages"].items():
            expect(float(advantages.abs().max()) <= bound, f"record {r}, depth {depth}: an advantage beyond ±{bound:g}")
            wanted = unclipped(record, depth)
            beyond = wanted.abs() > bound
            seen += int(beyond.sum())
            error = off(advantages, wanted.clamp(-bound, bound))
            expect(
                error <= rounding(record, depth),
                f"record {r}, depth {depth}: not the clipped weighted sum, off by {error:.3g}{rounding_hint(error)}",
            )
    some([seen] if seen else [], "an advantage that the clip binds")
