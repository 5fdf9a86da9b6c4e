"""Every step of a plan as x′ = α x + b + u θ + std ξ, with the oracle's own kernel coefficients (spec: oracle)."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from branchgrpo.oracle.gaussian import GaussianData, velocity_intercept, velocity_slope
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput

Coefficients = tuple[float, float, float]
"""(A, B, std): a step has mean A x + B v and standard deviation std."""


@dataclass(frozen=True, eq=False)
class Chain:
    """The affine recursion along one path of a plan: x_{i+1} = α_i x_i + b_i + u_i θ_i + std_i ξ_i.

    Clause: ORACLE-3.

    Attributes:
        alpha: α_i = A_i + B_i a(σ_i).
        shift: b_i = B_i c(σ_i).
        response: u_i = B_i, by which θ_i of v_θ = v* + θ_i enters.
        std: std_i ≥ 0.
    """

    alpha: Float64[np.ndarray, "steps"]
    shift: Float64[np.ndarray, "steps"]
    response: Float64[np.ndarray, "steps"]
    std: Float64[np.ndarray, "steps"]

    @property
    def steps(self) -> int:
        """T."""
        return int(self.alpha.shape[0])


def ode_coefficients(sigma: float, after: float) -> Coefficients:
    """Euler: A = 1, B = −Δ, std = 0.  Clause: ORACLE-3."""
    return 1.0, after - sigma, 0.0


def sde_coefficients(sigma: float, after: float, g: float) -> Coefficients:
    """Euler–Maruyama: with κ = g²Δ/(2σ), A = 1 − κ, B = −Δ − κ(1 − σ), std = g√Δ.

    Clause: ORACLE-3.  Source: x − Δ v − κ·(x + (1 − σ) v), collected in x and v.
    """
    delta = sigma - after
    kappa = 0.5 * g**2 * delta / sigma
    return 1.0 - kappa, -(delta + kappa * (1.0 - sigma)), g * math.sqrt(delta)


def flow_strength(eta: float, sigma: float, sigma_1: float) -> float:
    """g = η √(σ/(1 − σ)); at σ = 1 the denominator is 1 − σ_1.  Clause: ORACLE-3.  Source: Flow-GRPO."""
    denominator = 1.0 - sigma_1 if sigma >= 1.0 else 1.0 - sigma
    return eta * math.sqrt(sigma / denominator)


def cps_coefficients(sigma: float, after: float, eta: float) -> Coefficients:
    """With φ = ηπ/2: A = (1 − σ′) + σ′ cos φ, B = (1 − σ)σ′ cos φ − σ(1 − σ′), std = σ′ sin φ.

    Clause: ORACLE-3.  Source: Flow-CPS, (1 − σ′)(x − σ v) + σ′ cos φ (x + (1 − σ) v) collected in x and v.
    """
    angle = 0.5 * math.pi * eta
    kept = after * math.cos(angle)
    return 1.0 - after + kept, (1.0 - sigma) * kept - sigma * (1.0 - after), after * math.sin(angle)


def step_coefficients(kernel: Kernel, sigma: float, after: float, sigma_1: float) -> Coefficients:
    """(A, B, std) of one kernel at one step.  Clause: ORACLE-3."""
    if kernel.kind is KernelKind.ODE:
        return ode_coefficients(sigma, after)
    if kernel.kind is KernelKind.CPS:
        return cps_coefficients(sigma, after, kernel.eta)
    flow = kernel.kind is KernelKind.FLOW_SDE
    return sde_coefficients(sigma, after, flow_strength(kernel.eta, sigma, sigma_1) if flow else kernel.eta)


def affine_chain(plan: Plan, data: GaussianData) -> Chain:
    """The recursion of a plan on Gaussian data; under ``denoised`` the last step is x̂⁰ = x − σ v, an ODE step.

    Clause: ORACLE-3.

    Args:
        plan: schedule, kernels and leaf output are read.
        data: N(m, τ²·I).
    """
    rows = []
    for i, (sigma, after) in enumerate(zip(plan.sigmas, plan.sigmas[1:], strict=False)):
        if plan.output is LeafOutput.DENOISED and i == plan.steps - 1:
            a, b, std = ode_coefficients(sigma, after)
        else:
            a, b, std = step_coefficients(plan.kernels[i], sigma, after, plan.sigmas[1])
        rows.append((a + b * velocity_slope(data, sigma), b * velocity_intercept(data, sigma), b, std))
    return Chain(*np.array(rows, dtype=np.float64).T.copy())


def trained_steps(plan: Plan, chain: Chain) -> tuple[int, ...]:
    """Steps with std > 0 that the plan allows to be trained: the causal credit rule.  Clause: ORACLE-13."""
    allowed = range(plan.steps) if plan.trained_steps is None else plan.trained_steps
    return tuple(i for i in range(plan.steps) if chain.std[i] > 0.0 and i in allowed)
