"""Transition kernels: a step is N(mean, std²·I) with one scalar std (spec: kernels)."""

import math

from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import Kernel, KernelKind


def denoised(x: Float[Tensor, "*latent"], v: Float[Tensor, "*latent"], sigma: float) -> Float[Tensor, "*latent"]:
    """Predicted data x̂⁰ = x − σ v.  Clause: KERN-1."""
    return x - sigma * v


def predicted_noise(x: Float[Tensor, "*latent"], v: Float[Tensor, "*latent"], sigma: float) -> Float[Tensor, "*latent"]:
    """Predicted noise ε̂ = x + (1 − σ) v.  Clause: KERN-1."""
    return x + (1.0 - sigma) * v


def constant_diffusion(eta: float) -> float:
    """g = η.  Clause: KERN-3.  Source: DanceGRPO (arXiv 2505.07818) and BranchGRPO, η = 0.3."""
    return eta


def flow_diffusion(eta: float, sigma: float, sigma_1: float) -> float:
    """g = η √(σ / (1 − σ)), with 1 − σ_1 in the denominator at σ = 1.

    Clause: KERN-3.  Source: Flow-GRPO (arXiv 2505.05470) Eq. 9 and G²RPO, η = 0.7.

    Args:
        eta: η ≥ 0.
        sigma: σ in (0, 1].
        sigma_1: second level of the *full* schedule.
    """
    return eta * math.sqrt(sigma / (1.0 - (sigma_1 if sigma == 1.0 else sigma)))


def ode_mean(x: Float[Tensor, "*latent"], v: Float[Tensor, "*latent"], delta: float) -> Float[Tensor, "*latent"]:
    """Euler step x − Δ v.  Clause: KERN-2."""
    return x - delta * v


def sde_mean(
    x: Float[Tensor, "*latent"], v: Float[Tensor, "*latent"], sigma: float, delta: float, g: float
) -> Float[Tensor, "*latent"]:
    """Euler–Maruyama mean x − Δ v − (g² Δ / (2σ)) ε̂: the ODE mean plus ½ g² Δ · score, score = −ε̂/σ.

    Clause: KERN-3.  Source: Flow-GRPO Eq. 8; DanceGRPO Eq. 6; BranchGRPO §3.
    """
    return ode_mean(x, v, delta) - (g * g * delta / (2.0 * sigma)) * predicted_noise(x, v, sigma)


def sde_std(delta: float, g: float) -> float:
    """g √Δ.  Clause: KERN-3."""
    return g * math.sqrt(delta)


def cps_mean(
    x: Float[Tensor, "*latent"], v: Float[Tensor, "*latent"], sigma: float, sigma_next: float, eta: float
) -> Float[Tensor, "*latent"]:
    """(1 − σ′) x̂⁰ + σ′ cos(ηπ/2) ε̂.  Clause: KERN-4.  Source: Flow-CPS (arXiv 2509.05952)."""
    kept = sigma_next * math.cos(eta * math.pi / 2.0)
    return (1.0 - sigma_next) * denoised(x, v, sigma) + kept * predicted_noise(x, v, sigma)


def cps_std(sigma_next: float, eta: float) -> float:
    """σ′ sin(ηπ/2).  Clause: KERN-4."""
    return sigma_next * math.sin(eta * math.pi / 2.0)


def step_std(kernel: Kernel, sigma: float, sigma_next: float, sigma_1: float) -> float:
    """The std by which a step scales its noise; 0 for a deterministic step.  Clause: KERN-5."""
    if not kernel.is_stochastic(sigma_next):
        return 0.0
    if kernel.kind is KernelKind.CPS:
        return cps_std(sigma_next, kernel.eta)
    return sde_std(sigma - sigma_next, diffusion(kernel, sigma, sigma_1))


def diffusion(kernel: Kernel, sigma: float, sigma_1: float) -> float:
    """g of an SDE kernel (0 for the ODE).  Clause: KERN-3."""
    if kernel.kind is KernelKind.FLOW_SDE:
        return flow_diffusion(kernel.eta, sigma, sigma_1)
    return constant_diffusion(kernel.eta)


def plan_stds(plan: Plan) -> tuple[float, ...]:
    """The std of every step of a plan, by its effective kernels.  Clause: KERN-5, PLAN-6."""
    levels = zip(plan.effective_kernels, plan.sigmas, plan.sigmas[1:], strict=False)
    return tuple(step_std(kernel, sigma, after, plan.sigmas[1]) for kernel, sigma, after in levels)


def transition(
    plan: Plan, step: int, x: Float[Tensor, "*latent"], v: Float[Tensor, "*latent"]
) -> tuple[Float[Tensor, "*latent"], float]:
    """Mean and std of step i of a plan.

    Clause: KERN-2 … KERN-6, PLAN-6.

    Args:
        plan: the plan; its effective kernel at ``step`` is used.
        step: i in 0..T−1.
        x: state at σ_i.
        v: velocity at (x, σ_i).

    Returns:
        The mean, shaped as ``x``, and the scalar std ≥ 0.
    """
    kernel, sigma, after = plan.effective_kernels[step], plan.sigmas[step], plan.sigmas[step + 1]
    std = step_std(kernel, sigma, after, plan.sigmas[1])
    if kernel.kind is KernelKind.ODE:
        return ode_mean(x, v, sigma - after), std
    if kernel.kind is KernelKind.CPS:
        return cps_mean(x, v, sigma, after, kernel.eta), std
    return sde_mean(x, v, sigma, sigma - after, diffusion(kernel, sigma, plan.sigmas[1])), std
