"""Exact expectations of policy-gradient estimators, against simulation, and the angles that follow."""

from math import lgamma

import numpy as np
import pytest
import torch
from helpers_oracle import (
    DATA,
    DENSE,
    LATE,
    SMALL_PLANS,
    Z_BOUND,
    exact_velocity,
    fused,
    make_plan,
    simulate,
    transition,
    z_of_mean,
)

from branchgrpo.conformance.clauses import clause
from branchgrpo.models.gaussian import ExactGaussian
from branchgrpo.oracle.chain import affine_chain
from branchgrpo.oracle.estimator import Estimator, baseline_factor, expected_estimate, step_weights
from branchgrpo.oracle.gradient import angle_degrees, reward_gradient
from branchgrpo.oracle.laws import given_node, random_root
from branchgrpo.oracle.reward import QuadraticReward, distance_reward, linear_reward
from branchgrpo.oracle.sibling_variance import SiblingGroup, estimator_variance, rescaled_variance
from branchgrpo.oracle.zscore import expected_zscore_estimate, ratio_expectation, zscore_factors
from branchgrpo.reference import kernels
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.log_probability import gaussian_log_density
from branchgrpo.reference.protocols import TensorCondition
from branchgrpo.reference.types import Reduction

BASELINES = ("none", "group_mean", "leave_one_out", "sibling_mean")
LINEAR = linear_reward(np.array([1.0, -0.5]))
MIXED = QuadraticReward(np.array([0.7, -0.4]), np.array([0.4, 0.9]), 1.0)


def advantages(values, baseline, factor):
    """Plain definitions of the baselines on values [trees, nodes]."""
    if baseline == "none":
        return values
    nodes = values.shape[1]
    if baseline == "sibling_mean":
        groups = values.reshape(values.shape[0], -1, factor)
        return (groups - groups.mean(axis=2, keepdims=True)).reshape(values.shape)
    if nodes == 1:
        return np.zeros_like(values)
    if baseline == "leave_one_out":
        return values - (values.sum(axis=1, keepdims=True) - values) / (nodes - 1)
    if baseline == "zscore":
        return (values - values.mean(axis=1, keepdims=True)) / values.std(axis=1, ddof=1, keepdims=True)
    return values - values.mean(axis=1, keepdims=True)


def sampled_estimates(plan, trees, reward, baseline, reduction, std_weights=False):
    """Σ_e w_e A_e ∇_{θ_i} log p_e of every tree, [trees, T, D], from the definition."""
    rewards, trained = reward(trees.states[-1]), [i for i in range(plan.steps) if trees.noises[i] is not None]
    edges = sum(trees.states[i + 1].shape[1] for i in trained)
    result = np.zeros((rewards.shape[0], plan.steps, trees.states[0].shape[2]))
    for i in trained:
        nodes = trees.states[i + 1].shape[1]
        weight = 1 / edges if reduction == "edge_mean" else 1 / (nodes * len(trained))
        weight *= trees.stds[i] / np.mean([trees.stds[j] for j in trained]) if std_weights else 1
        zero = np.zeros(1)
        response = transition(plan, i, zero, zero + 1.0)[0] - transition(plan, i, zero, zero)[0]
        score = response * trees.noises[i] / trees.stds[i]
        advantage = advantages(fused(rewards, nodes), baseline, plan.branching[i])
        result[:, i] = weight * np.sum(advantage[:, :, None] * score, axis=1)
    return result


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("name", SMALL_PLANS)
@clause("ORACLE-14", "ORACLE-15", "ORACLE-16")
def test_expectation_by_simulation(name, baseline):
    plan = SMALL_PLANS[name]
    chain, theta = affine_chain(plan, DATA), 0.3 * np.random.default_rng(2).normal(size=(plan.steps, 2))
    root = np.array([0.4, -0.8])
    for start, at in ((random_root(2), None), (given_node(root), root)):
        trees = simulate(plan, DATA, 30_000, 2, seed=21, root=at, theta=theta)
        for reduction in ("edge_mean", "depth_mean"):
            expected = expected_estimate(plan, chain, MIXED, start, Estimator(baseline, reduction), theta)
            assert z_of_mean(sampled_estimates(plan, trees, MIXED, baseline, reduction), expected) < Z_BOUND


@pytest.mark.parametrize("name", ["sde", "mixed-kernels"])
@clause("ORACLE-16")
def test_std_edge_weights_by_simulation(name):
    plan = SMALL_PLANS[name]
    chain, trees = affine_chain(plan, DATA), simulate(plan, DATA, 30_000, 2, seed=22)
    for reduction in ("edge_mean", "depth_mean"):
        uniform, weighted = (
            expected_estimate(plan, chain, MIXED, random_root(2), Estimator("group_mean", reduction, weights))
            for weights in ("uniform", "std")
        )
        sampled = sampled_estimates(plan, trees, MIXED, "group_mean", reduction, std_weights=True)
        assert z_of_mean(sampled, weighted) < Z_BOUND
        assert z_of_mean(sampled, uniform) > Z_BOUND


def test_the_simulation_can_tell_the_baselines_apart():
    plan = SMALL_PLANS["sde"]
    chain, trees = affine_chain(plan, DATA), simulate(plan, DATA, 30_000, 2, seed=21)
    sampled = sampled_estimates(plan, trees, MIXED, "group_mean", "depth_mean")
    wrong = expected_estimate(plan, chain, MIXED, random_root(2), Estimator("leave_one_out", "depth_mean"))
    assert z_of_mean(sampled, wrong) > 2 * Z_BOUND


@pytest.mark.parametrize("name", SMALL_PLANS)
@clause("ORACLE-17")
def test_without_a_baseline_depth_mean_is_the_gradient_and_edge_mean_is_not(name):
    plan = SMALL_PLANS[name]
    chain, start = affine_chain(plan, DATA), random_root(2)
    truth = reward_gradient(chain, MIXED, start)
    trained = chain.std > 0
    estimate = expected_estimate(plan, chain, MIXED, start, Estimator("none", "depth_mean"))
    np.testing.assert_allclose(estimate[trained] * trained.sum(), truth[trained], rtol=1e-14)
    assert np.all(estimate[~trained] == 0.0)
    other = expected_estimate(plan, chain, MIXED, start, Estimator("none", "edge_mean"))
    assert angle_degrees(other[trained], truth[trained]) > 0.1


@clause("ORACLE-15")
def test_several_grouped_roots_by_simulation():
    plan = SMALL_PLANS["sde"]
    chain, trees = affine_chain(plan, DATA), [simulate(plan, DATA, 30_000, 2, seed=s) for s in (31, 32)]
    expected = expected_estimate(
        plan, chain, MIXED, random_root(2), Estimator("group_mean", "depth_mean", grouped_roots=2)
    )
    result = np.zeros((30_000, plan.steps, 2))
    for i in range(plan.steps):
        nodes = trees[0].states[i + 1].shape[1]
        values = np.concatenate([fused(MIXED(t.states[-1]), nodes) for t in trees], axis=1)
        noise = np.concatenate([t.noises[i] for t in trees], axis=1)
        zero = np.zeros(1)
        response = transition(plan, i, zero, zero + 1.0)[0] - transition(plan, i, zero, zero)[0]
        score = response * noise / trees[0].stds[i]
        result[:, i] = np.mean(advantages(values, "group_mean", 2)[:, :, None] * score, axis=1) / plan.steps
    assert z_of_mean(result, expected) < Z_BOUND


@pytest.mark.parametrize("baseline", BASELINES[1:])
@pytest.mark.parametrize(("k", "s"), [(2, 4.0), (4, 1.0), (3, float("inf"))])
@clause("ORACLE-15")
def test_baseline_factor_holds_for_any_reward(k, s, baseline):
    rng = np.random.default_rng(8)
    shared, private = rng.standard_normal((400_000, 1)), rng.standard_normal((400_000, k))
    noise = private if np.isinf(s) else (shared + s * private) / np.sqrt(1 + s * s)
    values = np.tanh(2 * noise) + np.cos(3 * noise) + np.exp(0.4 * noise)
    rho = 0.0 if np.isinf(s) else 1 / (1 + s * s)
    factor = baseline_factor(baseline, k, k, rho)
    plain = (values * noise).mean(axis=1)
    assert z_of_mean((advantages(values, baseline, k) * noise).mean(axis=1) - factor * plain, 0.0) < Z_BOUND


@clause("ORACLE-15")
def test_baseline_factor_of_equicorrelated_siblings():
    for k in (2, 3, 16):
        for rho in (0.0, 1 / 17, 0.5):
            assert baseline_factor("sibling_mean", k, k, rho) == pytest.approx((1 - 1 / k) * (1 - rho), rel=1e-14)
            assert baseline_factor("group_mean", k, k, rho) == pytest.approx((1 - 1 / k) * (1 - rho), rel=1e-14)
            assert baseline_factor("leave_one_out", k, k, rho) == pytest.approx(1 - rho, rel=1e-14)
    assert baseline_factor("sibling_mean", 2, 2, 1 / 17) == pytest.approx(8 / 17, rel=1e-15)


def angles(splits, kernel, output, baseline, reward, trained_only=False):
    plan = make_plan(kernel=kernel, splits=splits, output=output)
    chain = affine_chain(plan, DATA)
    use = chain.std > 0 if trained_only else np.full(20, True)
    truth = reward_gradient(chain, reward, random_root(2))[use]
    return [
        angle_degrees(expected_estimate(plan, chain, reward, random_root(2), Estimator(baseline, r))[use], truth)
        for r in ("edge_mean", "depth_mean")
    ]


@pytest.mark.parametrize(
    "reward", [LINEAR, MIXED, distance_reward(np.array([2.0, -1.0]))], ids=["linear", "mixed", "distance"]
)
@clause("ORACLE-17")
def test_angles_of_the_dance_kernel(reward):
    dance = ("sde", 0.3)
    # 1e-6 degrees: the depth_mean estimate is the gradient up to scale, and acos-free angles keep 1e-14 radians.
    assert angles(DENSE, dance, "sample", "none", reward) == [
        pytest.approx(4.340, abs=5e-4),
        pytest.approx(0, abs=1e-6),
    ]
    assert angles(LATE, dance, "sample", "none", reward) == [
        pytest.approx(19.861, abs=5e-4),
        pytest.approx(0, abs=1e-6),
    ]
    # A baseline costs depth_mean its exactness: its factor is not the same at every depth.
    assert angles(DENSE, dance, "sample", "group_mean", reward) == pytest.approx([4.637, 1.486], abs=5e-4)
    assert angles(DENSE, dance, "sample", "leave_one_out", reward) == pytest.approx([4.349, 0.092], abs=5e-4)
    assert angles(LATE, dance, "sample", "group_mean", reward) == pytest.approx([21.411, 8.237], abs=5e-4)


@clause("ORACLE-17")
def test_under_denoised_no_edge_can_train_the_last_step():
    dance = ("sde", 0.3)
    full = angles(DENSE, dance, "denoised", "none", MIXED)
    assert full == pytest.approx([32.916, 32.478], abs=5e-4)
    assert angles(DENSE, dance, "denoised", "none", MIXED, trained_only=True) == [
        pytest.approx(5.674, abs=5e-4),
        pytest.approx(0, abs=1e-6),
    ]


@clause("ORACLE-16")
def test_step_weights():
    plan = make_plan(4, splits=(0, 2), factor=3, output="denoised", trained=(0, 2))
    chain = affine_chain(plan, DATA)
    np.testing.assert_allclose(step_weights(plan, chain, "edge_mean"), [0.25, 0.0, 0.75, 0.0])
    np.testing.assert_allclose(step_weights(plan, chain, "depth_mean"), [0.5, 0.0, 0.5, 0.0])


@pytest.mark.parametrize("name", ["sde", "flow-denoised", "mixed-kernels", "identical-siblings", "cps"])
@clause("ORACLE-23")
def test_zscored_expectation_by_simulation(name):
    plan = SMALL_PLANS[name]
    chain, reward = affine_chain(plan, DATA), linear_reward(np.array([2.0, -1.5]), 4.0)
    for start, at in ((random_root(2), None), (given_node(np.ones(2)), np.ones(2))):
        trees = simulate(plan, DATA, 40_000, 2, seed=23, root=at)
        for reduction in ("edge_mean", "depth_mean"):
            expected = expected_zscore_estimate(plan, chain, reward, start, reduction)
            assert z_of_mean(sampled_estimates(plan, trees, reward, "zscore", reduction), expected) < Z_BOUND


@pytest.mark.parametrize("n", [2, 3, 7, 16])
@clause("ORACLE-23")
def test_ratio_expectation_of_independent_values(n):
    # A = z-score of n independent N(0, 1): Σ A_e y_e = √(n − 1) · χ_{n−1}, whose mean is √2 Γ(n/2)/Γ((n − 1)/2).
    chi = np.sqrt(2) * np.exp(lgamma(n / 2) - lgamma((n - 1) / 2))
    # 1e-12: the trapezoid rule's tails are cut at e^{-36}.
    assert ratio_expectation(np.eye(n), np.eye(n)) == pytest.approx(np.sqrt(n - 1) * chi, rel=1e-12)


@clause("ORACLE-23")
def test_zscore_factor_of_a_group_without_spread_is_zero():
    plan = make_plan(2, ("sde", 0.5), (0,), 2, 0.0, "denoised")
    chain = affine_chain(plan, DATA)
    # Identical siblings followed by a deterministic step: every advantage is 0.
    np.testing.assert_array_equal(zscore_factors(plan, chain, random_root()), [0.0, 0.0])


@pytest.mark.parametrize("baseline", BASELINES[:3])
@pytest.mark.parametrize(
    "group",
    [SiblingGroup(2, 1 / 17, 3, 1.0, 0.7, 0.5), SiblingGroup(4, 0.3, 1, 0.8), SiblingGroup(3, 0.0, 5, 1.2, -1.0, 1.0)],
)
@clause("ORACLE-22")
def test_estimator_variance_by_simulation(group, baseline):
    rng, n = np.random.default_rng(13), 200_000
    shared = rng.standard_normal((n, 1, group.elements))
    noise = np.sqrt(group.rho) * shared + np.sqrt(1 - group.rho) * rng.standard_normal(
        (n, group.factor, group.elements)
    )
    values = group.offset + group.slope * noise[:, :, 0] + group.residual * rng.standard_normal((n, group.factor))
    estimates = (advantages(values, baseline, group.factor)[:, :, None] * noise).mean(axis=1)
    total = np.sum((estimates - estimates.mean(axis=0)) ** 2, axis=1)
    assert z_of_mean(total, estimator_variance(group, baseline)) < Z_BOUND
    factor = baseline_factor(baseline, group.factor, group.factor, group.rho)
    assert z_of_mean(estimates[:, 0], factor * group.slope) < Z_BOUND
    assert z_of_mean(total / factor**2, rescaled_variance(group, baseline)) < Z_BOUND


@clause("ORACLE-22")
def test_a_group_baseline_is_no_free_variance_reduction():
    for k in (2, 3, 4, 12, 16):
        for rho in (0.0, 1 / 17, 0.2, 0.9):
            centred = SiblingGroup(k, rho, 64)
            none, group = (rescaled_variance(centred, b) for b in ("none", "group_mean"))
            assert estimator_variance(centred, "group_mean") < estimator_variance(centred, "none")
            # Once it is scaled to the same expectation, a centred reward gains from ρ = 1/(K − 1) on, and loses before.
            assert (group < none) is (rho > 1 / (k - 1))
            assert none == pytest.approx(65 * (1 + (k - 1) * rho**2) / k, rel=1e-13)
            assert group == pytest.approx(65 / (k - 1), rel=1e-13)
            # Leave-one-out is the group mean rescaled, hence the same estimator once scaled.
            assert rescaled_variance(centred, "leave_one_out") == pytest.approx(group, rel=1e-13)
    # With an offset it does pay: a baseline removes c², from c² = h²(D + 1)/(D(K − 1)) on at ρ = 0.
    break_even = np.sqrt(65 / (64 * 3))
    for offset, better in ((0.99 * break_even, False), (1.01 * break_even, True)):
        group = SiblingGroup(4, 0.0, 64, 1.0, offset)
        assert (rescaled_variance(group, "group_mean") < rescaled_variance(group, "none")) is better


@clause("ORACLE-14")
def test_score_by_autograd_of_the_reference_log_probability():
    plan = SMALL_PLANS["mixed-kernels"]
    chain, rng = affine_chain(plan, DATA), np.random.default_rng(6)
    model = ExactGaussian(DATA.mean, DATA.tau, plan.sigmas, latent_shape=(3,))
    condition = TensorCondition({"none": torch.zeros(1, 1)})
    for i in np.flatnonzero(chain.std > 0).tolist():
        x, noise = rng.standard_normal((2, 3))
        mean, std = transition(plan, i, x, exact_velocity(DATA, x, plan.sigmas[i]))
        child = torch.from_numpy(mean + std * noise)
        state = torch.from_numpy(x)
        velocity = model(state[None], torch.tensor([plan.sigmas[i]], dtype=torch.float64), condition)[0]
        mu, sd = kernels.transition(plan, i, state, velocity)
        model.zero_grad()
        gaussian_log_density(child, mu, sd, Reduction.SUM).backward()
        gradient = model.theta.grad.numpy()
        np.testing.assert_allclose(gradient[i], chain.response[i] * noise / chain.std[i], rtol=1e-11)
        assert np.all(np.delete(gradient, i, axis=0) == 0.0)


def test_wrong_options_are_refused_by_name():
    plan = make_plan(4, splits=(0,))
    chain = affine_chain(plan, DATA)
    for field, wrong in (("baseline", "mean"), ("reduction", "sum"), ("edge_weights", "tempflow")):
        # The type checker of the test run refuses a wrong literal first; users have the check of __post_init__ alone.
        estimator = object.__new__(Estimator)
        for name, value in {
            "baseline": "none",
            "reduction": "edge_mean",
            "edge_weights": "uniform",
            field: wrong,
        }.items():
            object.__setattr__(estimator, name, value)
        with pytest.raises(OptionError, match=rf"{field} = '{wrong}': must be one of"):
            estimator.__post_init__()
    with pytest.raises(OptionError, match=r"grouped_roots = 0"):
        Estimator(grouped_roots=0)
    ode = make_plan(4, ("ode", 0.0), ())
    still = affine_chain(ode, DATA)
    with pytest.raises(OptionError, match=r"plan: trained steps = \(\): must be at least one stochastic step"):
        step_weights(ode, still, "edge_mean")
    with pytest.raises(OptionError, match=r"start.depth = 1"):
        expected_estimate(plan, chain, LINEAR, given_node(np.zeros(2), 1), Estimator())
    with pytest.raises(OptionError, match=r"reward.quadratic"):
        expected_zscore_estimate(plan, chain, MIXED, random_root(2), "depth_mean")
    with pytest.raises(OptionError, match=r"factor = 1: must be ≥ 2"):
        SiblingGroup(1)
    with pytest.raises(OptionError, match=r"rho = 1.0"):
        SiblingGroup(2, 1.0)
