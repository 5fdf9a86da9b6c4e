"""Trace checks of normalization, recomputed from the trace's own values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.conformance.checks.base import expect, needs, some, trace_check
from branchgrpo.conformance.checks.levels import by_tree
from branchgrpo.conformance.checks.limits import ADVANTAGE
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
    weights = torch.tensor([model.weight for model in record.reward_models], dtype=torch.float64)
    if record.normalization.order == "sum_then_normalize":
        return z_scores(record, values @ weights)
    columns = [z_scores(record, values[..., m]) for m in range(len(weights))]
    return torch.stack(columns, dim=-1) @ weights


@trace_check
@clause("NORM-1")
def advantages_are_depth_wise_scores(records: Sequence[Record]) -> None:
    """Advantages are the declared z-scores of the dumped values, depth by depth, before any clipping."""
    plain = [(r, record) for r, record in needs(records, "values", "advantages") if record.member is None]
    for r, record in some(plain, "values and advantages of a plan"):
        for depth, advantages in record.levels["advantages"].items():
            wanted, bound = unclipped(record, depth), record.normalization.clip
            free = wanted.abs() <= bound
            error = float((advantages - wanted)[free].abs().max()) if bool(free.any()) else 0.0
            expect(error <= ADVANTAGE, f"record {r}, depth {depth}: advantages off by {error:.3g}")


@dataclass(frozen=True)
class Scale:
    """What one std group's advantages were divided by: the slope of A against the value, and the candidates for it."""

    where: str
    slope: float
    bessel: float
    population: float

    def fits(self, candidate: float) -> bool:
        """Whether the slope is that of a candidate; a group of thousands could not tell the two apart."""
        return abs(self.slope - candidate) <= ADVANTAGE * abs(candidate)


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
    """The slope of every std group that is not degenerate."""
    weight, eps = record.reward_models[0].weight, record.normalization.eps
    for depth, advantages in record.levels["advantages"].items():
        values = record.levels["values"][depth][..., 0]
        own, found = by_tree(record, values).flatten(0, 1), by_tree(record, advantages).flatten(0, 1)
        for tree, group in enumerate(prompt_groups(record, values, record.normalization.std_scope)):
            mean = prompt_groups(record, values, record.normalization.mean_scope)[tree]
            if is_equal(mean) or is_equal(group) or is_equal(own[tree]):
                continue
            low, high = int(own[tree].argmin()), int(own[tree].argmax())
            slope = float((found[tree, high] - found[tree, low]) / (own[tree, high] - own[tree, low]))
            spreads = [weight / (float(group.std(correction=c)) + eps) for c in (1, 0)]
            yield Scale(f"record {r}, depth {depth}, tree {tree}", slope, *spreads)


@trace_check
@clause("NORM-2")
def groups_are_whole(records: Sequence[Record]) -> None:
    """Advantages are centred over the whole mean scope and scaled by the std of the whole std scope."""
    for r, record in plain_records(records):
        for depth, advantages in record.levels["advantages"].items():
            for group in prompt_groups(record, advantages, record.normalization.mean_scope):
                centre = abs(float(group.mean()))
                expect(
                    centre <= ADVANTAGE, f"record {r}, depth {depth}: a group's advantages have the mean {centre:.3g}"
                )
        for scale in scales(r, record):
            wanted = f"{scale.bessel:.6g} (Bessel) or {scale.population:.6g}"
            whole = scale.fits(scale.bessel) or scale.fits(scale.population)
            expect(whole, f"{scale.where}: advantages scaled by {scale.slope:.6g}, the std scope's is {wanted}")


@trace_check
@clause("NORM-3")
def the_std_has_the_declared_denominator(records: Sequence[Record]) -> None:
    """The std divides by n − 1 or by n, as declared."""
    found = [
        scale for r, record in plain_records(records) if record.normalization.bessel for scale in scales(r, record)
    ]
    other = [
        scale for r, record in plain_records(records) if not record.normalization.bessel for scale in scales(r, record)
    ]
    some([*found, *other], "a group with a spread")
    for scale in found:
        expect(not scale.fits(scale.population), f"{scale.where}: divided by the population std, Bessel's was declared")
    for scale in other:
        expect(not scale.fits(scale.bessel), f"{scale.where}: divided by Bessel's std, the population's was declared")


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
            error = (advantages - wanted.clamp(-bound, bound)).abs()
            expect(float(error.max()) <= ADVANTAGE, f"record {r}, depth {depth}: not the clipped weighted sum")
    some([seen] if seen else [], "an advantage that the clip binds")
