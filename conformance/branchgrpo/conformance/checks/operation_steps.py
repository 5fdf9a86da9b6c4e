"""Operation checks of kernels, branch noise and log-probability: formulas on given arrays."""

import math
from functools import partial

import torch
from scipy.stats import norm

from branchgrpo.conformance.checks.base import Subject, each_supported, expect, expect_close, operation_check
from branchgrpo.conformance.checks.levels import expected_stds
from branchgrpo.conformance.checks.limits import EXACT
from branchgrpo.conformance.clauses import clause
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput, Reduction


def numbers(subject: Subject, *shape: int, seed: int = 0) -> torch.Tensor:
    """Fixed standard normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(subject.device)


def plan_of(kind: KernelKind, eta: float, steps: int = 5) -> Plan:
    """A plan of one kernel, scored at x_T."""
    return tree_plan(steps, Kernel(kind, eta), output=LeafOutput.SAMPLE)


def compare_means(subject: Subject, plan: Plan, gains: list[tuple[float, float]]) -> None:
    """Means of every step against the coefficients of x and v that the kernel's formula has."""
    implementation = subject.operation("transition")
    x, v = numbers(subject, 3, 2, 5), numbers(subject, 3, 2, 5, seed=1)
    for step, (of_x, of_v) in enumerate(gains):
        mean, std = implementation.transition(plan, step, x, v)
        expect_close(mean, of_x * x + of_v * v, EXACT, f"{plan.kernels[step].kind.value} mean of step {step}")
        wanted = expected_stds(plan)[step]
        expect(
            abs(std - wanted) <= EXACT, f"{plan.kernels[step].kind.value} std of step {step}: {std}, expected {wanted}"
        )


@operation_check
@clause("KERN-2")
def ode_steps_are_euler_steps(subject: Subject) -> None:
    """The ODE step is x − Δ v without noise."""
    plan = plan_of(KernelKind.ODE, 0.0)
    compare_means(subject, plan, [(1.0, -delta) for delta in plan.deltas])


def compare_sde_means(subject: Subject, kind: KernelKind, eta: float) -> None:
    """Means of one SDE kernel against its drift."""
    plan = plan_of(kind, eta)
    gains = []
    for sigma, delta in zip(plan.sigmas, plan.deltas, strict=False):
        ratio = sigma / (1 - (plan.sigmas[1] if sigma == 1 else sigma)) if kind is KernelKind.FLOW_SDE else 1.0
        drift = eta**2 * ratio * delta / (2 * sigma)
        gains.append((1 - drift, -delta - drift * (1 - sigma)))
    compare_means(subject, plan, gains)


@operation_check
@clause("KERN-3")
def sde_means_follow_the_score(subject: Subject) -> None:
    """SDE means are x − Δ v − g²Δ/(2σ)·(x + (1 − σ) v), for constant and flow g, at σ = 1 too."""
    settings = ((KernelKind.SDE, 0.3), (KernelKind.SDE, 1.1), (KernelKind.FLOW_SDE, 0.7))
    each_supported(partial(compare_sde_means, subject, kind, eta) for kind, eta in settings)


@operation_check
@clause("KERN-4")
def cps_means_keep_the_coefficients(subject: Subject) -> None:
    """CPS means are (1 − σ′) x̂⁰ + σ′ cos(ηπ/2) ε̂."""
    for eta in (0.25, 0.7, 1.0):
        plan = plan_of(KernelKind.CPS, eta)
        gains = []
        for sigma, after in zip(plan.sigmas, plan.sigmas[1:], strict=False):
            kept = after * math.cos(eta * math.pi / 2)
            gains.append((1 - after + kept, -sigma * (1 - after) + kept * (1 - sigma)))
        compare_means(subject, plan, gains)


@operation_check
@clause("KERN-6")
def means_are_differentiable(subject: Subject) -> None:
    """Gradients flow through the mean into x and v, with the coefficients of the mean itself."""
    implementation, plan = subject.operation("transition"), plan_of(KernelKind.SDE, 0.3)
    x, v = numbers(subject, 2, 4).requires_grad_(), numbers(subject, 2, 4, seed=1).requires_grad_()
    direction = numbers(subject, 2, 4, seed=2)
    mean, _ = implementation.transition(plan, 1, x, v)
    of_x, of_v = torch.autograd.grad((mean * direction).sum(), [x, v])
    with torch.no_grad():
        base = implementation.transition(plan, 1, x, v)[0]
        for name, found, moved in (("x", of_x, (x + direction, v)), ("v", of_v, (x, v + direction))):
            change = ((implementation.transition(plan, 1, *moved)[0] - base) * direction).sum()
            expect_close((found * direction).sum(), change, 1e-9, f"derivative of the mean in {name}")


@operation_check
@clause("NOISE-2")
def branch_noise_has_a_value_at_every_spread(subject: Subject) -> None:
    """ξ_b = (ξ₀ + s η_b)/√(1 + s²) for every s: ξ₀ at 0, η_b at ∞ and at huge s."""
    implementation = subject.operation("branch_noise")
    shared, private = numbers(subject, 3, 7), numbers(subject, 3, 4, 7, seed=1)
    for spread in (0.0, 1e-200, 0.5, 1.0, 4.0, 1e200, math.inf):
        norm = math.hypot(1.0, spread)
        a, c = (0.0, 1.0) if math.isinf(spread) else (1 / norm, spread / norm)
        found = implementation.branch_noise(shared, private, spread)
        expect_close(found, a * shared.unsqueeze(1) + c * private, EXACT, f"branch noise at s = {spread:g}")


def normal_density(child: torch.Tensor, mean: torch.Tensor, std: float) -> torch.Tensor:
    """Summed log-density of independent normals, by scipy."""
    terms = norm.logpdf(child.double().cpu().numpy(), mean.double().cpu().numpy(), std)
    return torch.from_numpy(terms).flatten(1).sum(dim=1)


@operation_check
@clause("LOGP-1")
def log_probability_is_the_normal_density(subject: Subject) -> None:
    """The summed log-probability is that of independent normals, constants included."""
    implementation = subject.operation("log_probability")
    child, mean = numbers(subject, 3, 2, 5), numbers(subject, 3, 2, 5, seed=1)
    for std in (0.03, 0.4, 2.0):
        wanted = normal_density(child, mean, std)
        found = implementation.log_probability(child, mean, std, Reduction.SUM)
        expect_close(found, wanted, EXACT, f"log-probability at std {std}")


@operation_check
@clause("LOGP-2")
def the_mean_reduction_divides_by_the_elements(subject: Subject) -> None:
    """The mean reduction is the sum over D."""
    implementation = subject.operation("log_probability")
    child, mean = numbers(subject, 3, 2, 5), numbers(subject, 3, 2, 5, seed=1)
    total = implementation.log_probability(child, mean, 0.3, Reduction.SUM)
    found = implementation.log_probability(child, mean, 0.3, Reduction.MEAN)
    expect_close(found, total / 10, EXACT, "mean reduction")


@operation_check
@clause("LOGP-5")
def log_probability_is_accumulated_in_float64(subject: Subject) -> None:
    """Sums of float32 arrays over many elements keep float64's precision, and are float64."""
    implementation = subject.operation("log_probability")
    child, mean = numbers(subject, 1, 200_000).float(), numbers(subject, 1, 200_000, seed=1).float()
    found = implementation.log_probability(child, mean, 0.3, Reduction.SUM)
    expect(found.dtype is torch.float64, f"log-probability has dtype {found.dtype}")
    wanted = normal_density(child, mean, 0.3)
    expect_close(found, wanted, 1e-9, "log-probability of 200,000 float32 elements")
