"""Order of convergence: leaf moments approach the data's as 1/T where the kernel keeps the marginals."""

import math

import torch

from branchgrpo.oracle.gaussian import velocity_intercept, velocity_slope
from branchgrpo.properties.checks.laws import DATA
from branchgrpo.properties.exact import at_most
from branchgrpo.properties.findings import Finding
from branchgrpo.properties.subject import Subject
from branchgrpo.properties.tolerances import CONVERGENCE_ORDER, LAW
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import Kernel, LeafOutput


def chain_plan(kernel: Kernel, steps: int) -> Plan:
    """One chain of one kernel on the shifted schedule."""
    return Plan(
        sigmas=shifted_schedule(steps, 3.0),
        kernels=(kernel,) * steps,
        branching=(1,) * steps,
        spreads=(math.inf,) * steps,
        output=LeafOutput.SAMPLE,
    )


def leaf_moments(subject: Subject, plan: Plan) -> tuple[float, float]:
    """Mean and variance of a leaf, by the implementation's own steps: each is affine, so two states read it off."""
    mean, variance = 0.0, 1.0
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64, device=subject.device)
    for i, sigma in enumerate(plan.sigmas[:-1]):
        v = velocity_slope(DATA, sigma) * x + velocity_intercept(DATA, sigma)
        out, std = subject.implementation.transition(plan, i, x, v)
        shift, alpha = float(out[0, 0]), float(out[1, 0] - out[0, 0])
        mean, variance = alpha * mean + shift, alpha * alpha * variance + std * std
    return mean, variance


def convergence_findings(subject: Subject, kernel: Kernel, title: str) -> list[Finding]:
    """The leaf variance's error halves when T doubles from 80 to 160, and the mean is the data's (KERN-2, KERN-3)."""
    moments = [leaf_moments(subject, chain_plan(kernel, steps)) for steps in (80, 160)]
    errors = [abs(variance - DATA.tau**2) for _, variance in moments]
    order = math.log2(errors[0] / errors[1])
    name = f"{subject.name}, convergence, {title}"
    shift = max(abs(mean - DATA.mean) for mean, _ in moments)
    return [
        at_most(f"{name}: order 1", "KERN-2 KERN-3", abs(order - 1.0), CONVERGENCE_ORDER, len(moments)),
        at_most(f"{name}: mean of the data", "KERN-2 KERN-3", shift, LAW, len(moments)),
    ]
