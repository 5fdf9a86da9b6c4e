"""Velocity, kernel coefficients and node laws of the oracle."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers_oracle import DATA, DENSE, SMALL_PLANS, Z_BOUND, make_plan, simulate, z_of_mean, z_of_variance

from branchgrpo.conformance.clauses import clause
from branchgrpo.models.gaussian import ExactGaussian
from branchgrpo.oracle.chain import affine_chain, step_coefficients, trained_steps
from branchgrpo.oracle.gaussian import GaussianData, noised_variance, velocity_intercept, velocity_slope
from branchgrpo.oracle.laws import (
    Start,
    cps_small_step_variance,
    gain,
    given_node,
    leaf_law,
    node_means,
    node_variances,
    random_root,
)
from branchgrpo.reference import kernels
from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Prompt, TensorCondition
from branchgrpo.reference.rollout import Sampling, rollout
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput


@pytest.mark.parametrize("sigma", [0.02, 0.3, 0.75, 1.0])
@clause("ORACLE-1", "ORACLE-2")
def test_velocity_is_the_regression_of_noise_minus_data(sigma):
    rng = np.random.default_rng(1)
    data, noise = DATA.mean + DATA.tau * rng.standard_normal(400_000), rng.standard_normal(400_000)
    x = (1 - sigma) * data + sigma * noise
    residual = noise - data - (velocity_slope(DATA, sigma) * x + velocity_intercept(DATA, sigma))
    # A least-squares residual has mean 0 and is orthogonal to the regressor: exactly two conditions, two coefficients.
    assert z_of_mean(residual, 0.0) < Z_BOUND
    assert z_of_mean(residual * (x - x.mean()), 0.0) < Z_BOUND
    assert z_of_variance(x, noised_variance(DATA, sigma)) < Z_BOUND


@clause("ORACLE-2")
def test_velocity_at_both_ends():
    assert velocity_slope(DATA, 1.0) == pytest.approx(1.0, abs=1e-15)
    assert velocity_intercept(DATA, 1.0) == pytest.approx(-DATA.mean, abs=1e-15)
    assert velocity_slope(DATA, 0.0) == pytest.approx(-1.0, abs=1e-15)
    assert velocity_intercept(DATA, 0.0) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("output", ["sample", "denoised"])
@pytest.mark.parametrize(
    "kernel", [("ode", 0.0), ("sde", 0.3), ("flow_sde", 0.7), ("cps", 0.7), ("cps", 1.0), ("sde", 0.0)]
)
@clause("ORACLE-3")
def test_chain_is_the_reference_kernel_on_the_exact_velocity(kernel, output):
    plan = make_plan(7, kernel, (), output=output)
    chain = affine_chain(plan, DATA)
    x = torch.linspace(-3.0, 3.0, 5, dtype=torch.float64)
    for i, sigma in enumerate(plan.sigmas[:-1]):
        v = velocity_slope(DATA, sigma) * x + velocity_intercept(DATA, sigma)
        mean, std = kernels.transition(plan, i, x, v)
        moved, _ = kernels.transition(plan, i, x, v + 1.0)
        # 1e-14: a dozen float64 operations on numbers of size ≤ 5.
        np.testing.assert_allclose(chain.alpha[i] * x.numpy() + chain.shift[i], mean.numpy(), rtol=0, atol=1e-14)
        np.testing.assert_allclose((moved - mean).numpy(), chain.response[i], rtol=0, atol=1e-14)
        assert chain.std[i] == pytest.approx(std, rel=1e-15, abs=0)


@pytest.mark.parametrize(
    ("kernel", "output", "variance"),
    [
        (("ode", 0.0), "sample", 0.18624),
        (("sde", 0.3), "sample", 0.19286),
        (("flow_sde", 0.7), "sample", 0.21055),
        (("sde", 0.3), "denoised", 0.19131),
        (("flow_sde", 0.7), "denoised", 0.21014),
    ],
)
@clause("ORACLE-4")
def test_check_values(kernel, output, variance):
    chain = affine_chain(make_plan(20, kernel, () if kernel[0] == "ode" else DENSE, output=output), DATA)
    mean, found = leaf_law(chain, random_root())
    assert mean[0] == pytest.approx(0.7, abs=1e-14)
    assert found == pytest.approx(variance, abs=1e-5)


def leaf_variance_of_many_steps(steps, kind, eta):
    """Variance by the oracle's step coefficients, without a plan (whose validation is quadratic in T)."""
    sigmas, variance = shifted_schedule(steps), 1.0
    for sigma, after in pairwise(sigmas):
        a, b, std = step_coefficients(Kernel(KernelKind(kind), eta), sigma, after, sigmas[1])
        variance = (a + b * velocity_slope(DATA, sigma)) ** 2 * variance + std**2
    return variance


@clause("ORACLE-5")
def test_the_sde_keeps_the_data_law_in_small_steps_and_cps_does_not():
    for kind, eta in (("ode", 0.0), ("sde", 0.3)):
        gaps = [DATA.tau**2 - leaf_variance_of_many_steps(t, kind, eta) for t in (60, 120)]
        # Euler–Maruyama is weakly of order 1: the gap halves when T doubles.
        assert 0 < gaps[1] < 1.2e-2
        assert gaps[0] / gaps[1] == pytest.approx(2.0, rel=0.04)
    # The flow kernel's g grows without bound at σ = 1, so its gap carries a logarithm; it still shrinks.
    flow = [abs(DATA.tau**2 - leaf_variance_of_many_steps(t, "flow_sde", 0.7)) for t in (60, 120)]
    assert flow[1] < 7e-3
    assert flow[1] < flow[0] / 2
    limit = cps_small_step_variance(DATA.tau, 0.7)
    assert limit == pytest.approx(0.18175, abs=1e-5)
    gaps = [limit - leaf_variance_of_many_steps(t, "cps", 0.7) for t in (40, 320)]
    # The variance settles where σ³ ~ Δ, so the gap falls as T^(−2/3): by 4 when T grows by 8.
    assert 0 < gaps[1] < 7e-3
    assert gaps[0] / gaps[1] == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize("name", SMALL_PLANS)
@clause("ORACLE-4")
def test_node_laws_by_simulation(name):
    plan = SMALL_PLANS[name]
    chain, theta = affine_chain(plan, DATA), np.random.default_rng(0).normal(size=(plan.steps, 2))
    trees = simulate(plan, DATA, 40_000, 2, seed=3, theta=theta)
    means, variances = node_means(chain, random_root(2), theta), node_variances(chain, random_root(2))
    for d, state in enumerate(trees.states):
        assert z_of_mean(state[:, -1], means[d]) < Z_BOUND
        assert z_of_variance(state[:, -1], variances[d]) < Z_BOUND


@clause("ORACLE-4")
def test_law_given_a_node_by_simulation():
    plan, state = SMALL_PLANS["sde"], np.array([1.3, -0.4])
    chain = affine_chain(plan, DATA)
    leaves = simulate(plan, DATA, 40_000, 2, seed=4, root=state, depth=2).states[-1]
    mean, variance = leaf_law(chain, given_node(state, 2))
    assert z_of_mean(leaves[:, 0], mean) < Z_BOUND
    assert z_of_variance(leaves[:, 1], variance) < Z_BOUND
    # The law below a node composes with the node's own law to the leaf's law.
    at_node = node_variances(chain, random_root())[2]
    total = gain(chain, 2, plan.steps) ** 2 * at_node + variance
    assert total == pytest.approx(leaf_law(chain, random_root())[1], rel=1e-14)


@pytest.mark.parametrize(
    ("kind", "eta", "output"),
    [("ode", 0.0, "sample"), ("sde", 0.3, "sample"), ("flow_sde", 0.7, "sample"), ("cps", 0.7, "denoised")],
)
@clause("ORACLE-4")
def test_leaf_moments_of_a_reference_rollout(kind, eta, output):
    elements, steps = 60_000, 20
    plan = Plan(
        shifted_schedule(steps),
        (Kernel(KernelKind(kind), eta),) * steps,
        (1,) * steps,
        (4.0,) * steps,
        output=LeafOutput(output),
    )
    condition = TensorCondition({"none": torch.zeros(1, 1)})
    sampling = Sampling(KeyedNoise(7), (elements,))
    (tree,) = rollout(plan, ExactGaussian(DATA.mean, DATA.tau), Prompt(0, ""), condition, sampling)
    leaf = tree.root.leaves()[0].state.numpy()
    mean, variance = leaf_law(affine_chain(plan, DATA), random_root())
    # Standard errors: √(V/n) = 0.0018 of the mean and V√(2/n) = 0.0011 of the variance.
    assert abs(leaf.mean() - mean[0]) < Z_BOUND * np.sqrt(variance / elements)
    assert abs(leaf.var() - variance) < Z_BOUND * variance * np.sqrt(2.0 / elements)


@clause("ORACLE-13")
def test_trained_steps_follow_noise_output_and_plan():
    assert trained_steps(*_with_chain(make_plan(4, ("sde", 0.3), (0,)))) == (0, 1, 2, 3)
    assert trained_steps(*_with_chain(make_plan(4, ("sde", 0.3), (0,), output="denoised"))) == (0, 1, 2)
    assert trained_steps(*_with_chain(make_plan(4, ("cps", 0.3), (0,)))) == (0, 1, 2)
    assert trained_steps(*_with_chain(make_plan(4, ("sde", 0.3), (0,), trained=(2, 1)))) == (1, 2)


def _with_chain(plan):
    return plan, affine_chain(plan, DATA)


def test_wrong_input_is_refused_by_name():
    chain = affine_chain(make_plan(4, splits=(0,)), DATA)
    with pytest.raises(OptionError, match=r"data.tau = 0.0: must be finite and > 0"):
        GaussianData(0.7, 0.0)
    with pytest.raises(OptionError, match=r"data.mean = inf"):
        GaussianData(float("inf"), 1.0)
    with pytest.raises(InputError, match=r"start.variance = -1.0: must be finite and ≥ 0"):
        Start(np.zeros(1), -1.0)
    with pytest.raises(InputError, match=r"start.mean"):
        given_node(np.array([np.nan]))
    with pytest.raises(InputError, match=r"start.depth = 5: must be at most T = 4"):
        leaf_law(chain, given_node(np.zeros(1), 5))
    with pytest.raises(InputError, match=r"start.depth = -1"):
        given_node(np.zeros(1), -1)
    with pytest.raises(InputError, match=r"theta: shape = \(4, 3\): must be \(4, 2\)"):
        node_means(chain, random_root(2), np.zeros((4, 3)))
