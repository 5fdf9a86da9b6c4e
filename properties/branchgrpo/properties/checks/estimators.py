"""Fusion and gradient estimators against their exact laws: expectations by cubature, sums of samples by saddlepoint.

Cubature drives the implementation itself: prompt p gets the p-th point of a product Gauss–Hermite rule as noise, so
weighted sums over prompts *are* expectations, to rounding, of everything that is a polynomial in the noise.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64

from branchgrpo.models.gaussian import ExactGaussian
from branchgrpo.oracle.chain import Chain, affine_chain
from branchgrpo.oracle.estimator import Baseline, EdgeReduction, Estimator, expected_estimate, step_weights
from branchgrpo.oracle.fusion import fusion_variance
from branchgrpo.oracle.laws import Start, given_node, leaf_law, node_means
from branchgrpo.oracle.reward import QuadraticReward, expected_reward, linear_reward
from branchgrpo.properties.checks.laws import DATA, gaussian_model
from branchgrpo.properties.cubature import product_rule
from branchgrpo.properties.exact import as_array, at_most, close
from branchgrpo.properties.findings import Finding
from branchgrpo.properties.linear import draws_of, linear_tree
from branchgrpo.properties.sources import ChosenNoise, ConstantRoots
from branchgrpo.properties.statistics.law import law_test
from branchgrpo.properties.statistics.saddlepoint import QuadraticForm
from branchgrpo.properties.statistics.variance import variance_test
from branchgrpo.properties.subject import Draws, Subject, all_kept, numbered_prompts
from branchgrpo.properties.tolerances import CUBATURE, CUBATURE_SQUARED
from branchgrpo.reference.implementation import Levels, Trace
from branchgrpo.reference.options import Fusion, Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseRole, NoiseSource
from branchgrpo.reference.types import Reduction

Array = Float64[np.ndarray, "..."]

ROOT_STATE = 0.6
"""State of the known root."""

UNIFORM = Fusion("path_softmax", 0.0)
BASELINES: tuple[Baseline, ...] = ("none", "group_mean", "leave_one_out", "sibling_mean")


@dataclass(frozen=True, eq=False)
class Grid:
    """Rollouts at every point of a rule.

    Attributes:
        trace: one prompt a point.
        weights: of the points, sum 1.
        start: the known root, for the oracle.
    """

    trace: Trace
    weights: Array
    start: Start


def grow_grid(subject: Subject, plan: Plan, points: int, with_theta: bool = False) -> tuple[Grid, ExactGaussian]:
    """Roll a plan with a known root out at every point of the rule.

    Returns:
        The grid, and the model that grew it.
    """
    chain = affine_chain(plan, DATA)
    draws = draws_of(plan, chain, random_root=False)
    table, weights = product_rule(len(draws), points)
    roots = [(NoiseRole.ROOT, root, 0, 0) for root in range(plan.roots)]
    table = np.concatenate([table, np.full((len(table), plan.roots), ROOT_STATE)], axis=1)
    model = gaussian_model(subject, plan, (1,) if with_theta else None)
    source = ChosenNoise([*draws, *roots], table)
    prompts = numbered_prompts(len(table))
    trace = subject.grow(plan, model, source, prompts, Draws((1,), reduction=Reduction.SUM))
    return Grid(trace, weights, given_node(np.array([ROOT_STATE]))), model


def grow_many(subject: Subject, plan: Plan, model: ExactGaussian, source: NoiseSource, trees: int) -> Trace:
    """Trees of one element from the known root, one a prompt."""
    draws = Draws((1,), reduction=Reduction.SUM)
    return subject.grow(plan, model, ConstantRoots(source, ROOT_STATE), numbered_prompts(trees), draws)


def leaf_rewards(trace: Trace, reward: QuadraticReward) -> torch.Tensor:
    """Rewards of all leaves, one model."""
    return torch.from_numpy(reward(as_array(trace.states[-1]))).unsqueeze(-1)


def fusion_findings(subject: Subject, plan: Plan, reward: QuadraticReward, title: str) -> list[Finding]:
    """Uniform fusion of a known root: unbiased, with the exact variance of its plan (FUSE-6)."""
    grid, _ = grow_grid(subject, plan, points=3)
    chain, name = affine_chain(plan, DATA), f"{subject.name}, uniform fusion, {title}"
    values = as_array(subject.implementation.fuse(grid.trace, leaf_rewards(grid.trace, reward), UNIFORM)[0])[:, 0, 0]
    mean = float(grid.weights @ values)
    truth = expected_reward(reward, *leaf_law(chain, grid.start))
    variance = float(grid.weights @ np.square(values - mean))
    exact = fusion_variance(plan, chain, reward, grid.start)
    return [
        at_most(f"{name}: unbiased", "FUSE-1 FUSE-6", abs(mean - truth), CUBATURE, len(values)),
        at_most(f"{name}: variance", "FUSE-6", abs(variance / exact - 1.0), CUBATURE_SQUARED, len(values)),
    ]


def with_baseline(level: Array, baseline: Baseline, factor: int) -> Array:
    """r̄ less a baseline, for ``[trees, nodes]`` of one depth."""
    count = level.shape[1]
    if baseline == "none":
        return level
    if baseline == "group_mean":
        return np.asarray(level - level.mean(axis=1, keepdims=True))
    if baseline == "leave_one_out":
        if count == 1:
            return np.zeros_like(level)
        return np.asarray(level - (level.sum(axis=1, keepdims=True) - level) / (count - 1))
    groups = level.reshape(len(level), -1, factor)
    return np.asarray((groups - groups.mean(axis=2, keepdims=True)).reshape(level.shape))


def baseline_advantages(plan: Plan, values: Levels, baseline: Baseline, weights: Array) -> Levels:
    """Advantages of all depths, weighted so that the mean over prompts is the weighted sum."""
    arrays = [as_array(level)[..., 0] for level in values]
    scale = (weights * len(weights))[:, None]
    below = [
        with_baseline(level, baseline, factor) * scale for level, factor in zip(arrays[1:], plan.branching, strict=True)
    ]
    return tuple(torch.from_numpy(np.ascontiguousarray(level)) for level in (np.zeros_like(arrays[0]), *below))


def theta_gradient(
    subject: Subject, trace: Trace, model: ExactGaussian, advantages: Levels, reduction: EdgeReduction
) -> Array:
    """∂J/∂θ, ``[T, 1]``."""
    assert model.theta is not None
    kept = all_kept(trace.plan, len(trace.prompts))
    moved = tuple(level.to(subject.device) for level in advantages)
    value = subject.objective(
        trace,
        model,
        moved,
        kept,
        Objective(reduction=reduction),
        Reduction.SUM,
    )
    (gradient,) = torch.autograd.grad(value, [model.theta])
    return as_array(gradient)


def gradient_findings(
    subject: Subject, plan: Plan, reward: QuadraticReward, reduction: EdgeReduction, title: str
) -> list[Finding]:
    """Expected gradient of every baseline against w_i·φ_i·∂E[r]/∂θ_i (OBJ-4, OBJ-7)."""
    grid, model = grow_grid(subject, plan, points=3, with_theta=True)
    chain, found = affine_chain(plan, DATA), []
    values = subject.implementation.fuse(grid.trace, leaf_rewards(grid.trace, reward), UNIFORM)
    for baseline in BASELINES:
        advantages = baseline_advantages(plan, values, baseline, grid.weights)
        gradient = theta_gradient(subject, grid.trace, model, advantages, reduction)
        truth = expected_estimate(plan, chain, reward, grid.start, Estimator(baseline, reduction))
        name = f"{subject.name}, expected gradient, {title}, {reduction}, baseline {baseline}"
        found.append(close(name, "OBJ-1 OBJ-4 OBJ-7", gradient, truth, CUBATURE))
    return found


def estimator_form(
    plan: Plan, chain: Chain, a: float, baseline: Baseline, reduction: EdgeReduction, direction: Array, start: Start
) -> QuadraticForm:
    """One tree's estimator along a direction of θ, as a quadratic form in the tree's normals, for r = a·x.

    Σ_i d_i Σ_e (w_i/n_{i+1}) (r̄_e − base_e) (u_i/std_i) ξ_e, with r̄_e and ξ_e linear forms of the oracle's recursion.
    """
    tree = linear_tree(plan, chain, random_root=False)
    leaves, normals = tree.states[-1], len(tree.draws)
    centre = a * float(node_means(chain, start)[-1, 0])
    matrix, vector = np.zeros((normals, normals)), np.zeros(normals)
    weights = step_weights(plan, chain, reduction)
    for i in range(plan.steps):
        if weights[i] == 0.0:
            continue
        count = plan.level_sizes[i + 1]
        forms = a * leaves.reshape(count, -1, normals).mean(axis=1)
        contrast = with_baseline(forms.T, baseline, plan.branching[i]).T
        level = with_baseline(np.full((1, count), centre), baseline, plan.branching[i])[0]
        scale = float(direction[i] * weights[i] / count * chain.response[i] / chain.std[i])
        matrix += scale * contrast.T @ tree.noises[i]
        vector += scale * level @ tree.noises[i]
    return QuadraticForm(matrix, vector)


def estimator_statistic(
    subject: Subject, plan: Plan, source: NoiseSource, baseline: Baseline, trees: int, title: str
) -> Finding:
    """The gradient over many trees, along a fixed direction, against the exact law of the sum (linear reward)."""
    chain, start = affine_chain(plan, DATA), given_node(np.array([ROOT_STATE]))
    model = gaussian_model(subject, plan, (1,))
    trace = subject.grow(
        plan, model, ConstantRoots(source, ROOT_STATE), numbered_prompts(trees), Draws((1,), reduction=Reduction.SUM)
    )
    reward = linear_reward(np.array([1.3]))
    values = subject.implementation.fuse(trace, leaf_rewards(trace, reward), UNIFORM)
    advantages = baseline_advantages(plan, values, baseline, np.full(trees, 1.0 / trees))
    gradient = theta_gradient(subject, trace, model, advantages, "depth_mean")[:, 0]
    direction = np.cos(1.0 + np.arange(plan.steps))
    law = estimator_form(plan, chain, 1.3, baseline, "depth_mean", direction, start)
    name = f"{subject.name}, gradient estimator, {title}, baseline {baseline}"
    return law_test(float(direction @ gradient), law, trees).finding(name, "OBJ-1 OBJ-4 OBJ-7")


def fusion_statistics(subject: Subject, plan: Plan, source: NoiseSource, trees: int, title: str) -> list[Finding]:
    """r̄ of a known root over many trees: the mean's exact law for a quadratic reward, the variance for a linear one."""
    chain, start = affine_chain(plan, DATA), given_node(np.array([ROOT_STATE]))
    model = gaussian_model(subject, plan)
    trace = subject.grow(
        plan, model, ConstantRoots(source, ROOT_STATE), numbered_prompts(trees), Draws((1,), reduction=Reduction.SUM)
    )
    forms, centre = linear_tree(plan, chain, random_root=False).states[-1], float(node_means(chain, start)[-1, 0])
    concave = QuadraticReward(np.array([-0.8]), np.array([0.5]))
    found = []
    values = as_array(subject.implementation.fuse(trace, leaf_rewards(trace, concave), UNIFORM)[0])
    count, slope = len(forms), 0.5 - 1.6 * centre
    law = QuadraticForm(-0.8 * forms.T @ forms / count, slope * forms.mean(axis=0), -0.8 * centre**2 + 0.5 * centre)
    name = f"{subject.name}, uniform fusion, {title}"
    found.append(law_test(float(values.mean()), law, trees).finding(f"{name}, concave reward", "FUSE-6"))
    straight = linear_reward(np.array([1.0]))
    values = as_array(subject.implementation.fuse(trace, leaf_rewards(trace, straight), UNIFORM)[0]).reshape(-1)
    variance = fusion_variance(plan, chain, straight, start)
    found.append(variance_test(values, variance, centre).finding(f"{name}, linear reward", "FUSE-6"))
    return found
