"""Trace checks of fusion, recomputed from the trace's own rewards and log-probabilities."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.conformance.checks.base import expect, needs, rounding_hint, some, trace_check
from branchgrpo.conformance.checks.levels import leaves_under, path_log_probs
from branchgrpo.conformance.checks.limits import VALUE
from branchgrpo.conformance.clauses import clause
from branchgrpo.conformance.record import Record

EQUAL = 2.0**-40
"""Relative spread up to which values are equal (NORM-4)."""


def child_softmax(record: Record, depth: int) -> Float64[Tensor, "prompts nodes under"]:
    """Weights of the leaves under every node of a depth, softmax by softmax (FUSE-4)."""
    prompts, nodes = len(record.prompts), record.nodes(depth)
    weights = torch.ones(prompts, nodes, 1, dtype=torch.float64)
    for below in range(depth + 1, record.plan.steps + 1):
        factor = record.plan.branching[below - 1]
        scores = torch.zeros(prompts, record.nodes(below), dtype=torch.float64)
        scores = record.levels["log_probs"].get(below, scores).reshape(prompts, -1, factor)
        own = torch.softmax(record.fusion.beta * scores, dim=-1).reshape(prompts, nodes, -1)
        weights = weights.repeat_interleave(factor, dim=2) * own
    return weights


def expected_weights(record: Record, depth: int) -> Float64[Tensor, "prompts nodes under"]:
    """Fusion weights by the declared estimator (FUSE-2, FUSE-4, FUSE-5)."""
    if record.fusion.kind == "child_softmax":
        return child_softmax(record, depth)
    scores = path_log_probs(record, depth)
    if record.fusion.kind == "standardised":
        spread = scores.std(dim=-1, correction=0, keepdim=True)
        width = scores.amax(dim=-1, keepdim=True) - scores.amin(dim=-1, keepdim=True)
        equal = width <= EQUAL * scores.abs().amax(dim=-1, keepdim=True)
        scores = torch.where(equal, 0.0, (scores - scores.mean(dim=-1, keepdim=True)) / spread)
    return torch.softmax(record.fusion.beta * scores, dim=-1)


def reward_scale(record: Record) -> float:
    """The largest |reward|, at least the smallest normal number."""
    assert record.rewards is not None
    return max(float(record.rewards.abs().max()), 1e-300)


@trace_check
@clause("FUSE-1")
def values_are_convex_combinations(records: Sequence[Record]) -> None:
    """A leaf keeps its reward; every value lies between the least and the largest reward below it."""
    for r, record in needs(records, "rewards", "values"):
        assert record.rewards is not None
        last = record.levels["values"][record.plan.steps]
        expect(torch.equal(last, record.rewards), f"record {r}: leaves do not keep their own rewards")
        slack = VALUE * reward_scale(record)
        for depth, values in record.levels["values"].items():
            below = leaves_under(record, depth, record.rewards)
            inside = (values >= below.amin(dim=2) - slack) & (values <= below.amax(dim=2) + slack)
            expect(bool(inside.all()), f"record {r}, depth {depth}: a value outside the rewards of its leaves")


def fused_by(records: Sequence[Record], kind: str) -> Iterator[tuple[int, Record]]:
    """Records with values and rewards by one fusion estimator."""
    found = [(r, record) for r, record in needs(records, "rewards", "values") if record.fusion.kind == kind]
    return iter(some(found, f"{kind} fusion"))


def compare_values(r: int, record: Record) -> None:
    """Dumped values against the declared fusion of the dumped rewards."""
    assert record.rewards is not None
    for depth, values in record.levels["values"].items():
        weights = expected_weights(record, depth)
        wanted = (weights.unsqueeze(-1) * leaves_under(record, depth, record.rewards)).sum(dim=2)
        error = float((values - wanted).abs().max()) / reward_scale(record)
        hint = rounding_hint(error)
        expect(error <= VALUE, f"record {r}, depth {depth}: values off by {error:.3g} of the rewards' scale{hint}")


@trace_check
@clause("FUSE-2")
def values_are_path_softmax(records: Sequence[Record]) -> None:
    """Values are the rewards weighted by softmax of β times the path log-probability."""
    for r, record in fused_by(records, "path_softmax"):
        compare_values(r, record)


@trace_check
@clause("FUSE-4")
def values_are_child_softmax(records: Sequence[Record]) -> None:
    """Values are the rewards weighted by products of softmaxes over siblings."""
    for r, record in fused_by(records, "child_softmax"):
        compare_values(r, record)


@trace_check
@clause("FUSE-5")
def values_are_standardised_softmax(records: Sequence[Record]) -> None:
    """Values are the rewards weighted by softmax of standardised path log-probabilities."""
    for r, record in fused_by(records, "standardised"):
        compare_values(r, record)
