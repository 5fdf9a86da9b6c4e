"""Trace checks of the noise: marginal law, siblings, and independence of everything else."""

import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float64
from scipy.stats import chi2, norm
from torch import Tensor

from branchgrpo.conformance.checks.base import UnsupportedError, expect, trace_check
from branchgrpo.conformance.checks.levels import noise, sibling_correlation, stochastic_depths
from branchgrpo.conformance.checks.limits import ALPHA, MISS
from branchgrpo.conformance.clauses import clause
from branchgrpo.conformance.record import Record

Z_ALPHA, Z_MISS = float(norm.isf(ALPHA / 2)), float(norm.isf(MISS))


def rounding_variance(record: Record, depth: int) -> float:
    """Variance that storing adds to z: that of a uniform error of one ulp of the largest states."""
    state = record.levels["states"][depth]
    ulp = float(torch.finfo(state.dtype).eps) * float(state.double().square().mean().sqrt())
    return (ulp / float(record.stds[depth - 1])) ** 2 / 4


def variance_limits(count: int, slack: float) -> tuple[float, float]:
    """Interval of the mean square of ``count`` standard normals: exact χ², widened by the rounding of states."""
    low, high = (float(q) / count for q in (chi2.ppf(ALPHA / 2, count), chi2.isf(ALPHA / 2, count)))
    return low - slack, high + slack + 2 * math.sqrt(slack * high)


def enough(count: int, effect: float, what: str) -> None:
    """Not supported if ``count`` elements cannot show a change of variance, or a correlation, of ``effect``."""
    needed = math.ceil(2 * ((Z_ALPHA + Z_MISS) / effect) ** 2)
    if count < needed:
        raise UnsupportedError(f"{what}: {count} elements, {needed} are needed to see an effect of {effect:g}")


def first_children(records: Sequence[Record]) -> Iterator[tuple[int, int, Float64[Tensor, "elements"], float]]:
    """z of one child a parent: independent standard normals, whatever the spread."""
    for r, record in enumerate(records):
        for depth in stochastic_depths(record):
            yield r, depth, noise(record, depth)[:, :, 0].flatten(), rounding_variance(record, depth)


@trace_check
@clause("NOISE-2")
def noise_has_unit_variance(records: Sequence[Record]) -> None:
    """z = (child − mean)/std has mean 0 and variance 1 at every stochastic step, splits included."""
    seen = 0
    for r, depth, z, slack in first_children(records):
        seen += len(z)
        low, high = variance_limits(len(z), slack)
        variance, mean = float(z.square().mean()), float(z.mean())
        expect(low <= variance <= high, f"record {r}, depth {depth}: variance of z {variance:.4g}, expected 1")
        limit = Z_ALPHA * math.sqrt((1 + slack) / len(z))
        expect(abs(mean) <= limit, f"record {r}, depth {depth}: mean of z {mean:.4g}, expected 0")
    enough(seen, 0.5, "variance of z")


@trace_check
@clause("NOISE-1")
def siblings_have_the_correlation_of_the_spread(records: Sequence[Record]) -> None:
    """Siblings' sum and contrasts have the variances that correlation 1/(1 + s²) implies."""
    seen, effect = 0, 1.0
    for r, record in enumerate(records):
        for depth in stochastic_depths(record):
            z = noise(record, depth)
            children, rho = z.shape[2], sibling_correlation(record, depth)
            if children == 1:
                continue
            slack = rounding_variance(record, depth)
            total = z.sum(dim=2) / math.sqrt(children)
            contrast = z - z.mean(dim=2, keepdim=True)
            parts = {
                "sum": (total.square().sum(), total.numel(), 1 + (children - 1) * rho),
                "contrasts": (contrast.square().sum(), total.numel() * (children - 1), 1 - rho),
            }
            for name, (squares, count, expected) in parts.items():
                low, high = variance_limits(count, slack / max(expected, slack, 1e-300))
                found = float(squares) / count
                where = f"record {r}, depth {depth}, {children} siblings, 1/(1 + s²) = {rho:.4g}"
                inside = low * expected <= found <= max(high * expected, 4 * slack)
                expect(inside, f"{where}: variance of the {name} {found:.4g}, expected {expected:.4g}")
            seen, effect = seen + total.numel(), min(effect, max(rho, 1 / children))
    if seen == 0:
        raise UnsupportedError("no record has a split")
    enough(seen, effect, "correlation of siblings")


def correlation_of(a: Float64[Tensor, "elements"], b: Float64[Tensor, "elements"]) -> tuple[float, float]:
    """Mean product of two series of standard normals, and its limit if they are independent."""
    spread = float((a.square().mean() * b.square().mean()).sqrt())
    return float((a * b).mean()), Z_ALPHA * spread / math.sqrt(a.numel())


@trace_check
@clause("NOISE-3")
def parents_and_depths_have_their_own_noise(records: Sequence[Record]) -> None:
    """Noise under different parents, and at different depths, is uncorrelated."""
    seen = 0
    for r, record in enumerate(records):
        before: Float64[Tensor, "prompts elements"] | None = None
        for depth in stochastic_depths(record):
            z = noise(record, depth).sum(dim=2)
            if z.shape[1] > 1:
                found, limit = correlation_of(z[:, :-1].flatten(), z[:, 1:].flatten())
                expect(
                    abs(found) <= limit,
                    f"record {r}, depth {depth}: parents share noise, product {found:.3g} > {limit:.3g}",
                )
                seen += z[:, 1:].numel()
            first = z[:, 0]
            if before is not None:
                found, limit = correlation_of(before.flatten(), first.flatten())
                expect(
                    abs(found) <= limit,
                    f"record {r}, depth {depth}: noise of the depth before again, product {found:.3g}",
                )
                seen += first.numel()
            before = first
    enough(seen, 0.25, "independence between parents and depths")


@trace_check
@clause("NOISE-4")
def prompts_and_roots_have_their_own_noise(records: Sequence[Record]) -> None:
    """Different prompts, and different roots of a prompt, have uncorrelated initial states and noise."""
    seen = 0
    for r, record in enumerate(records):
        start = record.levels["states"][0].double().flatten(2)
        series = [("initial state", start)] + [
            (f"noise of depth {depth}", noise(record, depth)[:, :, 0]) for depth in stochastic_depths(record)
        ]
        for name, values in series:
            roots = values.reshape(values.shape[0] * record.plan.roots, -1)
            if len(roots) > 1:
                found, limit = correlation_of(roots[:-1].flatten(), roots[1:].flatten())
                expect(abs(found) <= limit, f"record {r}: prompts or roots share their {name}, product {found:.3g}")
                seen += roots[1:].numel()
    if seen == 0:
        raise UnsupportedError("every record has one prompt and one root")
    enough(seen, 0.25, "independence between prompts")


@trace_check
@clause("ROLL-1")
def initial_states_are_standard_normal(records: Sequence[Record]) -> None:
    """Root states have mean 0 and variance 1."""
    start = torch.cat(
        [record.levels["states"][0].double().flatten() for record in records if record.member is None]
        or [records[0].levels["states"][0].double().flatten()]
    )
    enough(len(start), 0.5, "law of the initial states")
    slack = max(float(torch.finfo(record.levels["states"][0].dtype).eps) for record in records) ** 2
    low, high = variance_limits(len(start), slack)
    variance, mean = float(start.square().mean()), float(start.mean())
    expect(low <= variance <= high, f"variance of the initial states {variance:.4g}, expected 1")
    expect(abs(mean) <= Z_ALPHA / math.sqrt(len(start)), f"mean of the initial states {mean:.4g}, expected 0")
