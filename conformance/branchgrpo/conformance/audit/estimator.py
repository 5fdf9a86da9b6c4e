"""Stage: bias, variance and angle of the gradient estimator, component by component, step by step."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.conformance.audit.context import Context, Data, missing, reason
from branchgrpo.conformance.audit.noise import grow, realised
from branchgrpo.oracle.chain import Chain, affine_chain
from branchgrpo.oracle.estimator import EdgeReduction, Estimator, expected_estimate, step_weights
from branchgrpo.oracle.gaussian import GaussianData
from branchgrpo.oracle.gradient import angle_degrees, reward_gradient
from branchgrpo.oracle.laws import random_root
from branchgrpo.oracle.reward import linear_reward
from branchgrpo.oracle.zscore import expected_zscore_estimate
from branchgrpo.reference.implementation import Levels, Trace
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.options import Fusion, Normalization
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput

DATA, TREES, ELEMENTS = GaussianData(0.7, 0.5), 300, 2
DIRECTION = np.array([1.0, -0.5])
DEVIATIONS = 7.0
"""Standard errors that a mean of 300 trees may be away: 1e-9 for ten components and steps, tails taken as normal."""


@dataclass(frozen=True)
class Component:
    """One way to form the estimator.

    Attributes:
        name: what it adds to the one before.
        plan: tree or flat group.
        advantage: ``none``, ``group_mean`` or ``zscore``.
        reduction: over edges or over depths.
    """

    name: str
    plan: Plan
    advantage: str
    reduction: EdgeReduction


def components() -> tuple[Component, ...]:
    """From flat GRPO to the published method, one change a row; eight leaves each."""
    sde = Kernel(KernelKind.SDE, 0.3)
    flat = tree_plan(8, sde, splits=(0,), branching=8, output=LeafOutput.SAMPLE)
    early = tree_plan(8, sde, splits=(0, 1, 3), branching=2, spread=4.0, output=LeafOutput.SAMPLE)
    late = tree_plan(8, sde, splits=(3, 5, 7), branching=2, spread=4.0, output=LeafOutput.SAMPLE)
    return (
        Component("flat group, z-scores", flat, "zscore", "edge_mean"),
        Component("tree, rewards as they are", early, "none", "edge_mean"),
        Component("tree, group mean subtracted", early, "group_mean", "edge_mean"),
        Component("tree, z-scores (BranchGRPO)", early, "zscore", "edge_mean"),
        Component("tree, z-scores, mean over depths", early, "zscore", "depth_mean"),
        Component("late splits, z-scores", late, "zscore", "edge_mean"),
        Component("late splits, mean over depths", late, "zscore", "depth_mean"),
    )


def advantages_of(context: Context, trace: Trace, component: Component) -> list[Float64[Tensor, "trees _"]]:
    """Advantages a depth, from the implementation's own fusion and normalization."""
    leaves = trace.states[-1]
    direction = torch.from_numpy(DIRECTION).to(leaves.device)
    rewards = (leaves.double() @ direction).unsqueeze(-1)
    values: Levels = context.subject.implementation.fuse(trace, rewards, Fusion(beta=0.0))
    if component.advantage == "zscore":
        options = Normalization(eps=0.0, clip=1e6)
        return [a.cpu() for a in context.subject.implementation.normalize(trace.plan, values, (1.0,), options)]
    plain = [level[..., 0].cpu() for level in values]
    if component.advantage == "none":
        return plain
    return [level - level.mean(dim=1, keepdim=True) for level in plain]


def tree_gradients(
    plan: Plan, chain: Chain, trace: Trace, advantages: list[Tensor], reduction: EdgeReduction
) -> Float64[np.ndarray, "trees steps elements"]:
    """Σ_e w_e A_e ∂log p_e/∂θ_i of every tree: ∂log p_e/∂θ_i = u_i ξ_e/std_i (ORACLE-14)."""
    weights = step_weights(plan, chain, reduction)
    parts = []
    for step in range(plan.steps):
        xi = realised(trace, step + 1).flatten(1, 2)
        scale = float(weights[step] * chain.response[step] / chain.std[step]) / plan.level_sizes[step + 1]
        parts.append(scale * (advantages[step + 1].unsqueeze(-1) * xi).sum(dim=1))
    return torch.stack(parts, dim=1).numpy()


def expectation(component: Component, chain: Chain) -> Float64[np.ndarray, "steps elements"]:
    """The estimator's exact expectation."""
    reward, start = linear_reward(DIRECTION), random_root(ELEMENTS)
    if component.advantage == "zscore":
        return expected_zscore_estimate(component.plan, chain, reward, start, component.reduction)
    made = Estimator(component.advantage, component.reduction)  # type: ignore[arg-type]
    return expected_estimate(component.plan, chain, reward, start, made)


def measure(context: Context, component: Component) -> tuple[Data, float]:
    """One row: exact angle and scale, measured variance; and how far the measured mean is from the exact one."""
    plan, chain = component.plan, affine_chain(component.plan, DATA)
    # One implementation draws all trees: prompts are trees.
    trace = grow(context, replace(plan), TREES, ELEMENTS)
    advantages = advantages_of(context, trace, component)
    samples = tree_gradients(plan, chain, trace, advantages, component.reduction)
    exact = expectation(component, chain)
    truth = reward_gradient(chain, linear_reward(DIRECTION), random_root(ELEMENTS))
    scale = float((exact * truth).sum() / np.square(truth).sum())
    error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    away = np.abs(samples.mean(axis=0) - exact) / np.where(error > 0, error, np.inf)
    variance = float(samples.var(axis=0, ddof=1).sum())
    row: dict[str, Any] = {
        "component": component.name,
        "angle": angle_degrees(exact, truth),
        "scale": scale,
        "bias": float(np.linalg.norm(exact / scale - truth) / np.linalg.norm(truth)),
        "variance": variance,
        "noise": float(np.sqrt(variance) / (scale * np.linalg.norm(truth))),
        "calls": sum(plan.level_sizes[:-1]),
        "exact": (exact @ DIRECTION / np.square(DIRECTION).sum() / scale).tolist(),
        "found": (samples.mean(axis=0) @ DIRECTION / np.square(DIRECTION).sum() / scale).tolist(),
        "truth": (truth @ DIRECTION / np.square(DIRECTION).sum()).tolist(),
    }
    return row, float(away.max())


def gradient_estimator(context: Context) -> Data:
    """All components, and whether the implementation's estimator has the expectation that the oracle gives it."""
    if not context.has("rollout", "fuse", "normalize"):
        return missing("rollout", "fuse", "normalize")
    rows, reasons = [], []
    for component in components():
        row, away = measure(context, component)
        rows.append(row | {"deviation": away})
        if not away <= DEVIATIONS:
            said = f"gradient estimator ({component.name}): {away:.1f} standard errors from its exact expectation"
            reasons.append(reason("reject", said, "OBJ-1"))
    return {"rows": rows, "trees": TREES, "reasons": reasons}
