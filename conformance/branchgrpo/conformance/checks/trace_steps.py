"""Trace checks of kernels, rollout, log-probability and ratio."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.conformance.checks.base import expect, fail, needs, some, trace_check
from branchgrpo.conformance.checks.levels import expected_stds, noise, stochastic_depths
from branchgrpo.conformance.checks.limits import LOG_PROB, STD
from branchgrpo.conformance.clauses import clause
from branchgrpo.conformance.record import Record
from branchgrpo.reference.types import Reduction


def log_density(record: Record, depth: int) -> Float64[Tensor, "prompts nodes"]:
    """Mean over the elements of log N(state; mean, std²), from the arrays of the trace."""
    z = noise(record, depth)
    mean = (-0.5 * z * z).mean(dim=-1) - math.log(float(record.stds[depth - 1])) - 0.5 * math.log(2 * math.pi)
    return mean.flatten(1)


def log_prob_error(record: Record, depth: int, reduction: Reduction) -> float:
    """Largest difference to the dumped log-probabilities, an element."""
    scale = math.prod(record.latent_shape) if reduction is Reduction.SUM else 1
    return float((record.levels["log_probs"][depth] / scale - log_density(record, depth)).abs().max())


@trace_check
@clause("KERN-5")
def step_stds_are_the_kernels(records: Sequence[Record]) -> None:
    """The std of every step is the one that its kernel and levels imply, √Δ included."""
    for r, record in enumerate(records):
        for step, (found, wanted) in enumerate(zip(record.stds.tolist(), expected_stds(record.plan), strict=True)):
            close = abs(found - wanted) <= STD * max(wanted, 1.0)
            expect(close, f"record {r}, step {step}: std {found:.6g}, its kernel's is {wanted:.6g}")


@trace_check
@clause("KERN-2")
def deterministic_steps_add_no_noise(records: Sequence[Record]) -> None:
    """Where a step is deterministic the child is the mean, rounded to the storage dtype."""
    seen = [
        (r, record, depth)
        for r, record in enumerate(records)
        for depth in record.depths("edges")
        if depth - 1 not in record.plan.stochastic_steps
    ]
    for r, record, depth in some(seen, "a deterministic step"):
        state = record.levels["states"][depth]
        mean = record.levels["means"][depth].to(state.dtype)
        expect(
            torch.equal(state, mean), f"record {r}, depth {depth}: states differ from the mean of a deterministic step"
        )


@trace_check
@clause("ROLL-5")
def states_have_the_storage_dtype(records: Sequence[Record]) -> None:
    """Every state is kept in the declared storage dtype."""
    for r, record in enumerate(records):
        for depth, state in record.levels["states"].items():
            found = str(state.dtype).removeprefix("torch.")
            expect(
                found == record.dtypes.storage, f"record {r}, depth {depth}: {found}, declared {record.dtypes.storage}"
            )


@trace_check
@clause("LOGP-1")
def log_probs_are_the_density(records: Sequence[Record]) -> None:
    """log p is −z²/2 − log std − ½ log 2π an element, where states are kept in the dtype they are made in."""
    plain = [(r, record) for r, record in enumerate(records) if record.dtypes.storage == record.dtypes.arithmetic]
    for r, record in some(plain, "states stored as they are made"):
        for depth in stochastic_depths(record):
            error = min(log_prob_error(record, depth, reduction) for reduction in Reduction)
            expect(error <= LOG_PROB, f"record {r}, depth {depth}: log-probabilities off by {error:.3g} an element")


@trace_check
@clause("LOGP-2")
def log_probs_have_the_declared_reduction(records: Sequence[Record]) -> None:
    """The declared reduction fits the log-probabilities, the other one does not fit better."""
    for r, record in enumerate(records):
        for depth in stochastic_depths(record):
            other = Reduction.MEAN if record.reduction is Reduction.SUM else Reduction.SUM
            declared, alternative = (log_prob_error(record, depth, kind) for kind in (record.reduction, other))
            if declared > LOG_PROB and alternative < declared / 4:
                fail(f"record {r}, depth {depth}: declared {record.reduction.value}, dumped {other.value}")


@trace_check
@clause("LOGP-3")
def log_probs_are_of_the_stored_state(records: Sequence[Record]) -> None:
    """Where storing rounds, the log-probability is that of the rounded child."""
    rounded = [(r, record) for r, record in enumerate(records) if record.dtypes.storage != record.dtypes.arithmetic]
    for r, record in some(rounded, "states stored in another dtype than they are made in"):
        for depth in stochastic_depths(record):
            error = log_prob_error(record, depth, record.reduction)
            expect(
                error <= LOG_PROB, f"record {r}, depth {depth}: off by {error:.3g} an element from the stored child's"
            )


@trace_check
@clause("OBJ-1")
def the_first_ratio_is_one(records: Sequence[Record]) -> None:
    """With the weights of the rollout every ratio is within a tenth of the clip range of 1."""
    for r, record in needs(records, "ratios"):
        limit = min(record.objective.clip_low, record.objective.clip_high) / 10
        for depth, ratios in record.levels["ratios"].items():
            fresh = torch.ones_like(ratios, dtype=torch.bool)
            if record.has("weight_versions"):
                fresh = record.levels["weight_versions"][depth] == 0
            drift = float((ratios[fresh] - 1).abs().max()) if bool(fresh.any()) else 0.0
            expect(
                drift <= limit, f"record {r}, depth {depth}: |ρ − 1| = {drift:.3g}, a tenth of the clip is {limit:.3g}"
            )


@trace_check
@clause("SING-6")
def ratios_are_taken_before_an_optimiser_step(records: Sequence[Record]) -> None:
    """All members of a family see the weights of the rollout: no ratio follows an optimiser step."""
    members = [(r, record) for r, record in needs(records, "weight_versions") if record.member is not None]
    for r, record in some(members, "a member of a plan family"):
        for depth, versions in record.levels["weight_versions"].items():
            late = int(versions.max())
            expect(late == 0, f"record {r}, member {record.member}, depth {depth}: ratio after {late} optimiser steps")
