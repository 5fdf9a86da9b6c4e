"""∂J/∂log p of every edge, seen from outside: a model whose velocity has one free offset a parent (TRACE-7)."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.implementation import Trace
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, Guidance, VelocityModel
from branchgrpo.reference.types import KernelKind, Reduction


class Probe(torch.nn.Module):
    """The velocity of a model plus δ_n at each stored parent n; δ = 0, so nothing changes but the gradient.

    An item belongs to the parent of its noise level whose stored state is nearest: the same one, bit by bit, in an
    implementation that trains on what it stored.
    """

    def __init__(self, model: VelocityModel, traces: Sequence[Trace]) -> None:
        super().__init__()
        self.model, self.guidance = model, Guidance()
        self.levels: dict[float, list[tuple[int, int]]] = {}
        self.parents: list[Float[Tensor, "nodes elements"]] = []
        self.offsets = torch.nn.ParameterList()
        self.slots: dict[tuple[int, int], int] = {}
        for t, trace in enumerate(traces):
            for step in trace.plan.stochastic_steps:
                states = trace.states[step]
                flat = states.double().reshape(-1, math.prod(states.shape[2:]))
                self.slots[t, step] = len(self.parents)
                self.levels.setdefault(trace.plan.sigmas[step], []).append((len(self.parents), len(flat)))
                self.parents.append(flat)
                self.offsets.append(torch.nn.Parameter(torch.zeros_like(flat)))

    def forward(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """v_θ(x, σ, c) + δ of the item's parent, which is 0."""
        velocity = self.model(x, sigma, condition)
        flat = x.double().flatten(1)
        rows = []
        for item, level in enumerate(sigma.double().tolist()):
            near = min(self.levels, key=lambda known: abs(known - level))
            slots = [slot for slot, _ in self.levels[near]]
            states = torch.cat([self.parents[slot] for slot in slots])
            offsets = torch.cat([self.offsets[slot] for slot in slots])
            rows.append(offsets[int((states - flat[item]).square().sum(dim=1).argmin())])
        return velocity + torch.stack(rows).to(velocity.dtype).reshape(velocity.shape)


def mean_slope(plan: Plan, step: int) -> float:
    """∂mean/∂v of a step: every kernel's mean is affine in the velocity (KERN-2 … KERN-4)."""
    kernel, sigma, after = plan.effective_kernels[step], plan.sigmas[step], plan.sigmas[step + 1]
    if kernel.kind is KernelKind.CPS:
        return -(1 - after) * sigma + after * math.cos(math.pi * kernel.eta / 2) * (1 - sigma)
    g2 = kernel.eta**2
    if kernel.kind is KernelKind.FLOW_SDE:
        g2 *= sigma / (1 - (plan.sigmas[1] if sigma == 1 else sigma))
    return -(sigma - after) * (1 + g2 * (1 - sigma) / (2 * sigma))


def edge_coefficients(
    probe: Probe, gradients: Sequence[Float64[Tensor, "_ elements"]], index: int, trace: Trace, reduction: Reduction
) -> dict[int, Float64[Tensor, "prompts _"]]:
    """∂J/∂log p of every stochastic edge of a trace, by depth.

    The gradient at a parent is Σ_e c_e·∂log p_e/∂v over its children, ∂log p_e/∂v = slope·z_e/std (over D, for the
    mean reduction): K unknowns, D equations, solved by least squares.
    """
    found = {}
    for step in trace.plan.stochastic_steps:
        std = float(trace.stds[step])
        child, mean = trace.states[step + 1].double(), trace.means[step].double()
        elements = math.prod(child.shape[2:])
        scale = mean_slope(trace.plan, step) / std / (elements if reduction is Reduction.MEAN else 1)
        z = ((child - mean) / std).reshape(-1, trace.plan.branching[step], elements)
        gradient = gradients[probe.slots[index, step]].reshape(-1, elements)
        solved = torch.linalg.lstsq((scale * z).mT, gradient.unsqueeze(-1)).solution
        found[step + 1] = solved.squeeze(-1).reshape(child.shape[:2])
    return found
