"""A plain tree simulator for the oracle's tests: published formulas, many trees at once, no code of the oracle."""

import math
from dataclasses import dataclass

import numpy as np

from branchgrpo.oracle.gaussian import GaussianData
from branchgrpo.reference.plan import Plan, branching_from_splits
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput

Z_BOUND = 5.0
"""|z| > 5 has probability 6e-7 under the right formula; the seeds are fixed, so a pass stays a pass."""

DATA = GaussianData(0.7, 0.5)
DENSE, LATE = (0, 3, 6, 9), (9, 12, 15, 18)


def make_plan(
    steps=20,
    kernel=("sde", 0.3),
    splits=DENSE,
    factor=2,
    spread=4.0,
    output="sample",
    roots=1,
    kernels=None,
    trained=None,
):
    """One kernel everywhere, or ``kernels`` as a list of (kind, eta)."""
    kinds = kernels or [kernel] * steps
    return Plan(
        sigmas=shifted_schedule(steps, 3.0),
        kernels=tuple(Kernel(KernelKind(kind), eta) for kind, eta in kinds),
        branching=branching_from_splits(steps, splits, factor),
        spreads=(spread,) * steps,
        roots=roots,
        output=LeafOutput(output),
        trained_steps=trained,
    )


SMALL_PLANS = {
    "sde": make_plan(6, splits=(0, 2), spread=1.0, kernels=[("sde", 0.6)] * 5 + [("sde", 0.1)]),
    "flow-denoised": make_plan(5, ("flow_sde", 0.7), (1, 3), 2, 4.0, "denoised"),
    "cps": make_plan(4, ("cps", 0.7), (0, 2), 3, 2.0),
    "mixed-kernels": make_plan(
        6,
        splits=(1, 4),
        spread=0.5,
        kernels=[("ode", 0), ("sde", 0.8), ("ode", 0), ("cps", 0.4), ("flow_sde", 0.7), ("ode", 0)],
    ),
    "identical-siblings": make_plan(6, ("sde", 0.7), (1,), 3, 0.0, "denoised"),
    "independent-siblings": make_plan(6, ("sde", 0.7), (0, 2), 2, math.inf, "denoised"),
}


@dataclass
class Trees:
    """states[d]: [trees, nodes, D]; noises[i], scores of step i: [trees, children, D] (None where std is 0)."""

    states: list
    noises: list
    stds: list


def exact_velocity(data, x, sigma):
    """E[ε | x] − E[x⁰ | x]."""
    q = (1 - sigma) ** 2 * data.tau**2 + sigma**2
    residual = x - (1 - sigma) * data.mean
    return sigma * residual / q - (data.mean + (1 - sigma) * data.tau**2 * residual / q)


def transition(plan, i, x, v):
    """Mean and std of a step, in terms of x̂⁰ and ε̂."""
    sigma, after = plan.sigmas[i], plan.sigmas[i + 1]
    data_hat, noise_hat, delta = x - sigma * v, x + (1 - sigma) * v, sigma - after
    kind, eta = plan.kernels[i].kind.value, plan.kernels[i].eta
    if kind == "ode" or (plan.output is LeafOutput.DENOISED and i == plan.steps - 1):
        return (1 - after) * data_hat + after * noise_hat, 0.0
    if kind == "cps":
        angle = eta * math.pi / 2
        return (1 - after) * data_hat + after * math.cos(angle) * noise_hat, after * math.sin(angle)
    g2 = eta**2 if kind == "sde" else eta**2 * sigma / (1 - (plan.sigmas[1] if sigma == 1 else sigma))
    return x - delta * v + 0.5 * g2 * delta * (-noise_hat / sigma), math.sqrt(g2 * delta)


def simulate(plan, data, trees, elements, seed, root=None, theta=None, depth=0):
    """Grow trees from a random root, or below a given state of the given depth; ``theta`` [T, D]."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((trees, 1, elements)) if root is None else np.broadcast_to(root, (trees, 1, elements))
    states, noises, stds = [x], [], []
    for i in range(depth, plan.steps):
        v = exact_velocity(data, x, plan.sigmas[i]) + (0.0 if theta is None else theta[i])
        mean, std = transition(plan, i, x, v)
        k, nodes = plan.branching[i], x.shape[1]
        noise = rng.standard_normal((trees, nodes, k, elements))
        if k > 1 and not math.isinf(plan.spreads[i]):
            shared, s = rng.standard_normal((trees, nodes, 1, elements)), plan.spreads[i]
            noise = (shared + s * noise) / math.sqrt(1 + s * s)
        x = (mean[:, :, None] + std * noise).reshape(trees, nodes * k, elements)
        states.append(x)
        noises.append(noise.reshape(trees, nodes * k, elements) if std > 0 else None)
        stds.append(std)
    return Trees(states, noises, stds)


def fused(values, nodes):
    """Uniform fusion: leaf values [trees, leaves] averaged under each of ``nodes`` nodes."""
    return values.reshape(values.shape[0], nodes, -1).mean(axis=2)


def z_of_mean(samples, expected):
    """z of the sample mean along axis 0; a constant sample is compared to rounding."""
    samples = np.asarray(samples, dtype=np.float64)
    error = samples.std(axis=0, ddof=1) / math.sqrt(samples.shape[0])
    gap = np.abs(samples.mean(axis=0) - expected)
    # 1e-12: rounding of a constant sample (an untrained step, a mean that noise does not reach).
    return np.max(np.where(gap < 1e-12, 0.0, gap / np.maximum(error, 1e-300)))


def z_of_variance(samples, expected):
    """z of the variance: mean of squared deviations, with its own estimated error."""
    return z_of_mean((samples - samples.mean(axis=0)) ** 2 * samples.shape[0] / (samples.shape[0] - 1), expected)


def z_of_covariance(x, y, expected):
    """z of the covariance of two samples."""
    return z_of_mean((x - x.mean(axis=0)) * (y - y.mean(axis=0)), expected)
