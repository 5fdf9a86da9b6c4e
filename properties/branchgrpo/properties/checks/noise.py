"""Branch noise that an implementation really used is N(0, I) with the sibling covariance of the plan, and nothing more.

Source: BranchGRPO Lemma 1 and Theorem 1; clauses NOISE-1, NOISE-2, NOISE-4.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64

from branchgrpo.properties.findings import Finding
from branchgrpo.properties.networks import Elementwise
from branchgrpo.properties.samples import realised_noise
from branchgrpo.properties.statistics.anderson import anderson_test
from branchgrpo.properties.statistics.correlation import correlation_test
from branchgrpo.properties.statistics.ks import ks_test
from branchgrpo.properties.statistics.mean import mean_test
from branchgrpo.properties.statistics.moments import kurtosis_test, skewness_test
from branchgrpo.properties.statistics.variance import variance_test
from branchgrpo.properties.subject import Draws, Subject, numbered_prompts
from branchgrpo.reference.implementation import Trace
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseSource
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput

Array = Float64[np.ndarray, "..."]

PROMPTS, ROOTS = 10, 2
FULL_ELEMENTS = 80_000
"""D at full size: 10 prompts × 2 roots × 2 parents × D = 3.2·10⁶ independent elements at the second split."""


def noise_plan(spread: float) -> Plan:
    """Two splits and one step without a split, all stochastic, two roots."""
    return Plan(
        sigmas=(1.0, 2.0 / 3.0, 1.0 / 3.0, 0.0),
        kernels=(Kernel(KernelKind.SDE, 1.0),) * 3,
        branching=(2, 2, 1),
        spreads=(spread,) * 3,
        roots=ROOTS,
        output=LeafOutput.SAMPLE,
    )


def correlation_of(spread: float) -> float:
    """ρ = 1/(1 + s²)."""
    return float(1.0 / (1.0 + spread * spread))


def elements(scale: float, full: int = FULL_ELEMENTS) -> int:
    """D at a scale: even, and large enough for every test at the smallest."""
    return max(500, 2 * int(full * scale / 2))


@dataclass(frozen=True, eq=False)
class NoiseSample:
    """Realised noise of ``noise_plan``, ``[prompts, roots, nodes of one root, D]`` a depth.

    Attributes:
        root: states of depth 0, one node a root.
        first, second, third: noise of the edges into depth 1 (2 nodes), 2 and 3 (4 nodes).
    """

    root: Array
    first: Array
    second: Array
    third: Array


def split_roots(noise: Array) -> Array:
    """``[prompts, R·n, D]`` → ``[prompts, R, n, D]``."""
    return noise.reshape(noise.shape[0], ROOTS, -1, noise.shape[-1])


def noise_trace(
    subject: Subject, source: NoiseSource, spread: float, size: int, dtype: torch.dtype, iteration: int = 0
) -> Trace:
    """A rollout of ``noise_plan`` through a model without parameters worth knowing."""
    draws = Draws((size,), dtype, dtype, iteration=iteration)
    model = Elementwise().to(subject.device)
    with torch.no_grad():
        return subject.grow(noise_plan(spread), model, source, numbered_prompts(PROMPTS), draws)


def noise_sample(trace: Trace) -> NoiseSample:
    """Realised noise of a trace."""
    root = trace.states[0].detach().cpu().double().numpy()
    return NoiseSample(split_roots(root), *(split_roots(realised_noise(trace, depth)) for depth in (1, 2, 3)))


def marginal_findings(name: str, sample: NoiseSample) -> Iterator[Finding]:
    """One child of every parent of the second split: mean, variance, whole law, third and fourth moment."""
    one = sample.second[:, :, ::2].reshape(-1)
    for test in (mean_test, variance_test, ks_test, anderson_test, skewness_test, kurtosis_test):
        yield test(one).finding(f"{name}, split", "NOISE-1 NOISE-2")
    for title, values in (("no split", sample.third), ("root", sample.root)):
        yield mean_test(values.reshape(-1)).finding(f"{name}, {title}", "NOISE-3 NOISE-4")
        yield variance_test(values.reshape(-1)).finding(f"{name}, {title}", "NOISE-3 NOISE-4")


def pair_findings(name: str, sample: NoiseSample, spread: float) -> Iterator[Finding]:
    """Siblings correlate by 1/(1 + s²); parents, depths, roots, prompts and dimensions not at all."""
    second, half = sample.second, sample.second.shape[-1] // 2
    one = second[:, :, ::2]
    pairs = {
        "parents": (second[:, :, 0], second[:, :, 2]),
        "split depths": (sample.first[:, :, 0], second[:, :, 0]),
        "depths": (second[:, :, ::2], sample.third[:, :, ::2]),
        "root and edge": (sample.root[:, :, 0], sample.first[:, :, 0]),
        "roots": (one[:, 0], one[:, 1]),
        "prompts": (one[::2], one[1::2]),
        "half and half of the dimensions": (one[..., :half], one[..., half:]),
        "neighbouring dimensions": (one[..., ::2], one[..., 1::2]),
    }
    siblings = correlation_test(one.reshape(-1), second[:, :, 1::2].reshape(-1), correlation_of(spread))
    yield siblings.finding(f"{name}, siblings", "NOISE-1 NOISE-2")
    for title, (x, y) in pairs.items():
        yield correlation_test(x.reshape(-1), y.reshape(-1)).finding(f"{name}, {title}", "NOISE-1 NOISE-3 NOISE-4")


def branch_noise_findings(
    subject: Subject, source: NoiseSource, name: str, *, spread: float = 4.0, size: int, dtype: torch.dtype
) -> list[Finding]:
    """All statistics of one source at one spread.

    Args:
        subject: the implementation.
        source: noise source.
        name: for the table.
        spread: s at both splits, > 0 and finite.
        size: D, even.
        dtype: of arithmetic and states.
    """
    sample = noise_sample(noise_trace(subject, source, spread, size, dtype))
    return [*marginal_findings(name, sample), *pair_findings(name, sample, spread)]


def sibling_findings(
    subject: Subject, source: NoiseSource, name: str, *, spread: float, size: int, dtype: torch.dtype
) -> list[Finding]:
    """Only the siblings' correlation, at another spread (∞ allowed) or in another dtype."""
    sample = noise_sample(noise_trace(subject, source, spread, size, dtype))
    one, other = (sample.second[:, :, b::2].reshape(-1) for b in (0, 1))
    rho = 0.0 if np.isinf(spread) else correlation_of(spread)
    return [correlation_test(one, other, rho).finding(f"{name}, siblings at s = {spread:g}", "NOISE-1 NOISE-2")]


def iteration_findings(subject: Subject, source: NoiseSource, name: str, *, size: int) -> list[Finding]:
    """The noises of two iterations do not correlate."""
    first, second = (
        noise_sample(noise_trace(subject, source, 4.0, size, torch.float64, iteration)).second for iteration in (0, 1)
    )
    x, y = (values[:, :, ::2].reshape(-1) for values in (first, second))
    return [correlation_test(x, y).finding(f"{name}, iterations", "NOISE-4")]
