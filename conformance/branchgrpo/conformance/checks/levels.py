"""Index arithmetic on level-order arrays, and the checks' own formulas for a step (TRACE-2, KERN-2 … KERN-5)."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from branchgrpo.conformance.record import Record
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import Kernel, KernelKind


def step_std(kernel: Kernel, sigma: float, after: float, second: float) -> float:
    """Std of one step, written once more from the text of KERN-2 … KERN-5."""
    if kernel.kind is KernelKind.ODE or kernel.eta == 0:
        return 0.0
    if kernel.kind is KernelKind.CPS:
        return after * math.sin(math.pi * kernel.eta / 2)
    g = kernel.eta
    if kernel.kind is KernelKind.FLOW_SDE:
        g *= math.sqrt(sigma / (1 - (second if sigma == 1 else sigma)))
    return g * math.sqrt(sigma - after)


def expected_stds(plan: Plan) -> list[float]:
    """Std of every step of a plan; the last is 0 under ``denoised``."""
    kernels = plan.effective_kernels
    return [step_std(kernels[i], plan.sigmas[i], plan.sigmas[i + 1], plan.sigmas[1]) for i in range(plan.steps)]


def noise(record: Record, depth: int) -> Float64[Tensor, "prompts parents children elements"]:
    """z = (child − mean)/std of the edges that end at a depth, by parent."""
    child = record.levels["states"][depth].double()
    mean = record.levels["means"][depth].double()
    z = (child - mean) / record.stds[depth - 1]
    return z.reshape(z.shape[0], -1, record.plan.branching[depth - 1], math.prod(z.shape[2:]))


def stochastic_depths(record: Record) -> Iterator[int]:
    """Depths that end a stochastic step, as far as its dumped std is positive too."""
    return (step + 1 for step in record.plan.stochastic_steps if float(record.stds[step]) > 0)


def sibling_correlation(record: Record, depth: int) -> float:
    """1/(1 + s²) of the siblings at a depth."""
    spread = record.plan.spreads[depth - 1]
    return 0.0 if math.isinf(spread) else 1.0 / (1.0 + spread * spread)


def path_log_probs(record: Record, depth: int) -> Float64[Tensor, "prompts nodes under"]:
    """log p(ℓ | n) of the leaves under every node of a depth (LOGP-6)."""
    leaves = record.plan.roots * record.plan.leaves
    total = torch.zeros(len(record.prompts), leaves, dtype=torch.float64)
    for below, level in record.levels["log_probs"].items():
        if below > depth:
            total = total + level.repeat_interleave(leaves // level.shape[1], dim=1)
    return total.reshape(len(record.prompts), record.nodes(depth), -1)


def leaves_under(
    record: Record, depth: int, leaves: Float64[Tensor, "prompts leaves models"]
) -> Float64[Tensor, "prompts nodes under models"]:
    """Per-leaf values grouped by the node of a depth that they descend from."""
    return leaves.reshape(leaves.shape[0], record.nodes(depth), -1, leaves.shape[2])


def by_tree(record: Record, level: Shaped[Tensor, "prompts nodes *rest"]) -> Shaped[Tensor, "prompts roots own *rest"]:
    """An array of a depth grouped by tree."""
    return level.reshape(level.shape[0], record.plan.roots, -1, *level.shape[2:])
