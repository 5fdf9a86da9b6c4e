"""The gradient estimator with depth-wise z-scores against its exact expectation (spec: oracle, ORACLE-23).

Like the checks of the other baselines the expectation is a sum over prompts: prompt p gets the p-th point of a rule as
noise.  A z-score is no polynomial in the noise, so each depth has a rule of its own, in the direction of its contrasts.
"""

import math

import numpy as np
import torch
from jaxtyping import Float64

from branchgrpo.oracle.chain import Chain, affine_chain
from branchgrpo.oracle.estimator import EdgeReduction
from branchgrpo.oracle.laws import given_node
from branchgrpo.oracle.reward import QuadraticReward
from branchgrpo.oracle.zscore import contrast_basis, expected_zscore_estimate
from branchgrpo.properties.checks.estimators import ROOT_STATE, UNIFORM, leaf_rewards, theta_gradient
from branchgrpo.properties.checks.laws import DATA, gaussian_model
from branchgrpo.properties.contrasts import contrast_rule
from branchgrpo.properties.exact import close
from branchgrpo.properties.findings import Finding
from branchgrpo.properties.linear import linear_tree
from branchgrpo.properties.sources import ChosenNoise
from branchgrpo.properties.subject import Draws, Subject, numbered_prompts
from branchgrpo.properties.tolerances import Z_SCORED
from branchgrpo.reference.options import Normalization
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseRole
from branchgrpo.reference.types import Reduction

Array = Float64[np.ndarray, "..."]

Z_SCORES = Normalization(mean_scope="tree", std_scope="tree", bessel=True, eps=0.0, clip=math.inf)
"""The advantages of ORACLE-23: Bessel, ε = 0, no clip."""


def value_contrasts(plan: Plan, chain: Chain, depth: int) -> Float64[np.ndarray, "contrasts normals"]:
    """Contrasts of a depth's uniformly fused values, for r = x, as linear forms in the tree's normals."""
    leaves = linear_tree(plan, chain, random_root=False).states[-1]
    count = plan.level_sizes[depth]
    values = leaves.reshape(count, -1, leaves.shape[1]).mean(axis=1)
    return np.asarray(contrast_basis(count).T @ values)


def z_scored_gradient(
    subject: Subject, plan: Plan, reward: QuadraticReward, reduction: EdgeReduction, depth: int
) -> Float64[np.ndarray, "1"]:
    """Expected ∂J/∂θ of the step into a depth: rollout, fusion, normalisation and objective of the implementation."""
    chain = affine_chain(plan, DATA)
    draws = linear_tree(plan, chain, random_root=False).draws
    table, weights = contrast_rule(value_contrasts(plan, chain, depth))
    roots = [(NoiseRole.ROOT, root, 0, 0) for root in range(plan.roots)]
    table = np.concatenate([table, np.full((len(table), plan.roots), ROOT_STATE)], axis=1)
    model = gaussian_model(subject, plan, (1,))
    prompts = numbered_prompts(len(table))
    trace = subject.grow(
        plan, model, ChosenNoise([*draws, *roots], table), prompts, Draws((1,), reduction=Reduction.SUM)
    )
    values = subject.implementation.fuse(trace, leaf_rewards(trace, reward), UNIFORM)
    scores = subject.implementation.normalize(plan, values, (1.0,), Z_SCORES)
    scale = torch.from_numpy(weights * len(weights)).unsqueeze(1)
    advantages = tuple(level * scale.to(level.device) for level in scores)
    return np.asarray(theta_gradient(subject, trace, model, advantages, reduction)[depth - 1])


def z_scored_findings(
    subject: Subject, plan: Plan, reward: QuadraticReward, reduction: EdgeReduction, title: str
) -> list[Finding]:
    """Expected gradient with z-scored advantages against w_i·φ_i·∂E[r]/∂θ_i/|a|, every step (ORACLE-23).

    Args:
        subject: the implementation.
        plan: one root, at most four nodes a depth.
        reward: linear.
        reduction: ``edge_mean`` or ``depth_mean``.
        title: for the table.
    """
    start = given_node(np.array([ROOT_STATE]))
    truth = expected_zscore_estimate(plan, affine_chain(plan, DATA), reward, start, reduction)
    found = np.zeros_like(truth)
    for step in plan.stochastic_steps:
        found[step] = z_scored_gradient(subject, plan, reward, reduction, step + 1)
    name = f"{subject.name}, expected gradient, {title}, {reduction}, z-scores"
    return [close(name, "NORM-1 NORM-3 OBJ-4 OBJ-7 ORACLE-23", found, truth, Z_SCORED)]
