"""Stages: the law of the branch noise, and the covariance of siblings."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float64
from scipy.stats import beta, norm
from torch import Tensor

from branchgrpo.conformance.audit.context import Context, Data, missing, reason
from branchgrpo.conformance.audit.setting import MEAN, TAU, numbered_prompts
from branchgrpo.conformance.subjects import condition_for
from branchgrpo.models.gaussian import ExactGaussian
from branchgrpo.properties.statistics.anderson import anderson_test
from branchgrpo.properties.statistics.correlation import correlation_test
from branchgrpo.properties.statistics.ks import ks_test
from branchgrpo.properties.statistics.mean import mean_test
from branchgrpo.properties.statistics.moments import kurtosis_test, skewness_test
from branchgrpo.properties.statistics.outcome import Outcome
from branchgrpo.properties.statistics.variance import variance_test
from branchgrpo.reference.implementation import Trace
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput

Sample = Float64[np.ndarray, "n"]
ELEMENTS, PROMPTS = 4096, 4
"""16,384 pairs a spread: a correlation off by 0.07 is found with power 0.999."""

SPREADS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, math.inf)
QUANTILES = 120
BAND = 1e-3
"""A single quantile of a correct implementation is outside the drawn band with this probability."""


def grow(context: Context, plan: Plan, prompts: int, elements: int, **options: object) -> Trace:
    """A rollout with the run's noise source and the exact velocity of Gaussian data, in float64."""
    setting = context.setting
    own = numbered_prompts(prompts)
    device = context.subject.device
    settings: dict[str, object] = {
        "latent_shape": (elements,),
        "dtype": torch.float64,
        "storage_dtype": torch.float64,
        "reduction": setting.method.log_prob,
        "iteration": setting.config.iteration,
    }
    return context.subject.implementation.rollout(
        plan,
        ExactGaussian(MEAN, TAU).to(device),
        own,
        condition_for(own, torch.float64, device),
        setting.noise(),
        **{**settings, **options},  # type: ignore[arg-type]
    )


def realised(trace: Trace, depth: int) -> Float64[Tensor, "prompts parents children elements"]:
    """ξ = (child − mean)/std by parent."""
    child, mean = trace.states[depth].double().cpu(), trace.means[depth - 1].double().cpu()
    xi = (child - mean) / float(trace.stds[depth - 1])
    return xi.reshape(xi.shape[0], -1, trace.plan.branching[depth - 1], math.prod(xi.shape[2:]))


def row_of(name: str, clause: str, outcome: Outcome) -> Data:
    """A statistical check as one row of the table."""
    return {
        "check": f"{name}: {outcome.kind}",
        "clause": clause,
        "n": outcome.n,
        "statistic": outcome.statistic,
        "p": outcome.p,
        "detectable": outcome.detectable,
        "passed": outcome.p > outcome.alpha,
    }


def rejected(rows: Sequence[Data]) -> list[Data]:
    """A reason to reject for each row that did not pass."""
    return [
        reason("reject", f"{row['check']}: {row['statistic']:.4g} at n = {row['n']}, p = {row['p']:.2g}", row["clause"])
        for row in rows
        if not row["passed"]
    ]


def quantiles(sample: Sample) -> Data:
    """Points of a QQ plot against the standard normal, evenly spaced in it, and the band that each falls into.

    The k-th smallest of n draws is the quantile at a Beta(k, n − k + 1) level: the band is exact, tails included.
    """
    ordered, n = np.sort(sample), len(sample)
    reach = norm.ppf(1 - 0.5 / n)
    picked = np.unique((norm.cdf(np.linspace(-reach, reach, QUANTILES)) * n).astype(int).clip(0, n - 1))
    low, high = (norm.ppf(beta.ppf(level, picked + 1, n - picked)) for level in (BAND / 2, 1 - BAND / 2))
    columns = {"theory": norm.ppf((picked + 0.5) / n), "found": ordered[picked], "low": low, "high": high}
    return {name: column.round(5).tolist() for name, column in columns.items()} | {"n": n}


def branch_noise(context: Context) -> Data:
    """Noise of the run's plan at splits and elsewhere: QQ points and tests, one child a parent."""
    if not context.has("rollout"):
        return missing("rollout")
    plan = context.setting.plan()
    trace = grow(context, plan, PROMPTS, ELEMENTS // 8)
    rows, plots = [], {}
    kinds = {
        "split steps": [step for step in plan.stochastic_steps if plan.branching[step] > 1],
        "other steps": [step for step in plan.stochastic_steps if plan.branching[step] == 1],
    }
    for name, steps in kinds.items():
        if not steps:
            continue
        sample = torch.cat([realised(trace, step + 1)[:, :, 0].flatten() for step in steps]).numpy()
        plots[name] = quantiles(sample)
        for test in (mean_test, variance_test, ks_test, anderson_test):
            rows.append(row_of(f"noise of {name}", "NOISE-2", test(sample)))
        if len(sample) >= 10_000:
            rows += [row_of(f"noise of {name}", "NOISE-2", test(sample)) for test in (skewness_test, kurtosis_test)]
    return {"plots": plots, "rows": rows, "reasons": rejected(rows)}


def sibling_covariance(context: Context) -> Data:
    """Correlation of two siblings at several spreads against 1/(1 + s²)."""
    if not context.has("rollout"):
        return missing("rollout")
    rows, points = [], []
    for spread in SPREADS:
        plan = tree_plan(
            2, Kernel(KernelKind.SDE, 0.5), splits=(0,), branching=2, spread=spread, output=LeafOutput.SAMPLE
        )
        xi = realised(grow(context, plan, PROMPTS, ELEMENTS), 1)
        first, second = (xi[:, 0, child].flatten().numpy() for child in (0, 1))
        rho = 0.0 if math.isinf(spread) else 1.0 / (1.0 + spread**2)
        outcome = correlation_test(first, second, rho)
        rows.append(row_of(f"siblings at s = {spread:g}", "NOISE-1", outcome))
        error = 4.0 * (1 - rho**2) / math.sqrt(outcome.n)
        points.append(
            {
                "spread": None if math.isinf(spread) else spread,
                "expected": rho,
                "found": outcome.statistic + rho,
                "error": error,
            }
        )
    return {"points": points, "rows": rows, "reasons": rejected(rows)}
