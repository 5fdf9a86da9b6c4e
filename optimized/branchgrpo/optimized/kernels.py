"""Every transition kernel as three scalars: N(α x + γ v, std²·I) (spec: kernels)."""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import Kernel, KernelKind


@dataclass(frozen=True)
class Coefficients:
    """A step as N(α x + γ v, std²·I); std = 0 is deterministic.  Clause: KERN-2 … KERN-5."""

    alpha: float
    gamma: float
    std: float


def diffusion(kernel: Kernel, sigma: float, sigma_1: float) -> float:
    """g: η, or η √(σ / (1 − σ)) with 1 − σ_1 in the denominator at σ = 1.  Clause: KERN-3."""
    if kernel.kind is KernelKind.SDE:
        return kernel.eta
    return kernel.eta * math.sqrt(sigma / (1.0 - (sigma_1 if sigma == 1.0 else sigma)))


def sde_coefficients(sigma: float, after: float, g: float) -> Coefficients:
    """Euler–Maruyama: with c = g² Δ / (2σ), α = 1 − c, γ = −Δ − c (1 − σ), std = g √Δ.

    Clause: KERN-3.  Source: Flow-GRPO Eq. 8; DanceGRPO Eq. 6; collected in x and v.
    """
    delta = sigma - after
    c = g * g * delta / (2.0 * sigma)
    return Coefficients(1.0 - c, -delta - c * (1.0 - sigma), g * math.sqrt(delta))


def cps_coefficients(sigma: float, after: float, eta: float) -> Coefficients:
    """With k = σ′ cos(ηπ/2): α = 1 − σ′ + k, γ = k (1 − σ) − (1 − σ′) σ, std = σ′ sin(ηπ/2).

    Clause: KERN-4.  Source: Flow-CPS (arXiv 2509.05952), collected in x and v.
    """
    k = after * math.cos(eta * math.pi / 2.0)
    std = after * math.sin(eta * math.pi / 2.0) if eta > 0.0 else 0.0
    return Coefficients(1.0 - after + k, k * (1.0 - sigma) - (1.0 - after) * sigma, std)


def step_coefficients(plan: Plan, step: int) -> Coefficients:
    """α, γ and std of one step, by its effective kernel.

    Clause: KERN-2 … KERN-5, PLAN-6.

    Args:
        plan: the plan; under ``denoised`` its last step is exactly an ODE step.
        step: i in 0..T−1.
    """
    kernel, sigma, after = plan.effective_kernels[step], plan.sigmas[step], plan.sigmas[step + 1]
    if kernel.kind is KernelKind.ODE:
        return Coefficients(1.0, after - sigma, 0.0)
    if kernel.kind is KernelKind.CPS:
        return cps_coefficients(sigma, after, kernel.eta)
    return sde_coefficients(sigma, after, diffusion(kernel, sigma, plan.sigmas[1]))


def plan_stds(plan: Plan) -> tuple[float, ...]:
    """Std of every step of a plan.  Clause: KERN-5, PLAN-6."""
    return tuple(step_coefficients(plan, step).std for step in range(plan.steps))


def transition_mean(
    x: Float[Tensor, "items *latent"], v: Float[Tensor, "items *latent"], step: Coefficients
) -> Float[Tensor, "items *latent"]:
    """α x + γ v.  Clause: KERN-2 … KERN-4."""
    return step.alpha * x + step.gamma * v
