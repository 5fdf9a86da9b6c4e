"""Clauses of spec/kernels.md and spec/log_probability.md."""

import math

import pytest
import torch
from helpers_spec import CONDITION, CPS, FLOW, PROMPT, SDE, Network, close, f64, load_examples, small_plan

from branchgrpo.conformance.clauses import clause
from branchgrpo.reference.errors import PlanError
from branchgrpo.reference.kernels import (
    cps_mean,
    denoised,
    diffusion,
    flow_diffusion,
    ode_mean,
    plan_stds,
    predicted_noise,
    sde_mean,
    step_std,
    transition,
)
from branchgrpo.reference.log_probability import gaussian_log_density, path_log_probability
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.rollout import Sampling, rollout
from branchgrpo.reference.types import ODE, Kernel, KernelKind, LeafOutput, Reduction

KERNELS, EDGE = load_examples("kernels"), load_examples("log_probability")["edge"]
STEP = KERNELS["step"]
X, V = f64(STEP["x"]), f64(STEP["v"])


@clause("KERN-1")
def test_predicted_data_and_noise():
    close(denoised(X, V, STEP["sigma"]), STEP["denoised"])
    close(predicted_noise(X, V, STEP["sigma"]), STEP["predicted_noise"])
    data, noise = f64([0.3, -1.0]), f64([2.0, 0.5])
    x = 0.25 * data + 0.75 * noise
    close(denoised(x, noise - data, 0.75), data.tolist())
    close(predicted_noise(x, noise - data, 0.75), noise.tolist())


@clause("KERN-2", "KERN-3", "KERN-4", "KERN-5")
@pytest.mark.parametrize("example", KERNELS["kernel"], ids=lambda e: e["kind"])
def test_the_example_kernels(example):
    kernel = Kernel(KernelKind(example["kind"]), example["eta"])
    plan = Plan((1.0, 0.9, 0.75, 0.5, 0.0), (kernel,) * 4, (1,) * 4, (1.0,) * 4)
    mean, std = transition(plan, 2, X, V)
    close(mean, example["mean"])
    assert std == pytest.approx(example["std"], rel=1e-14)
    assert plan_stds(plan)[2] == std


@clause("KERN-3")
def test_flow_diffusion_at_the_first_level_reads_sigma_1_of_the_full_schedule():
    e = KERNELS["first_level"]
    assert flow_diffusion(e["eta"], 1.0, e["sigma_1"]) == pytest.approx(e["g"], rel=1e-14)
    assert flow_diffusion(0.7, 0.9, 0.5) == pytest.approx(0.7 * 3.0, rel=1e-14)
    plan = small_plan((), kernel=FLOW, shift=3.0)
    assert plan_stds(plan)[0] == pytest.approx(0.7 / math.sqrt(0.1) * math.sqrt(0.1), rel=1e-12)


@clause("KERN-3")
def test_the_sde_mean_is_the_ode_mean_plus_half_g_squared_delta_times_the_score():
    sigma, delta, g = 0.6, 0.2, 0.8
    score = -predicted_noise(X, V, sigma) / sigma
    close(sde_mean(X, V, sigma, delta, g), (ode_mean(X, V, delta) + 0.5 * g * g * delta * score).tolist())
    assert diffusion(SDE, 0.3, 0.9) == diffusion(SDE, 0.9, 0.9) == 0.3


@clause("KERN-2", "KERN-4", "ERR-2")
@pytest.mark.parametrize(
    ("kind", "eta"),
    [("ode", 0.1), ("cps", 1.1), ("cps", -0.1), ("sde", -1.0), ("sde", math.inf), ("flow_sde", math.nan)],
)
def test_noise_strengths_out_of_range_are_refused(kind, eta):
    with pytest.raises(PlanError, match=r"kernel.eta"):
        Kernel(KernelKind(kind), eta)


@clause("KERN-4")
def test_cps_at_the_ends_of_its_range():
    close(cps_mean(X, V, 0.75, 0.5, 0.0), ode_mean(X, V, 0.25).tolist())
    close(cps_mean(X, V, 0.75, 0.5, 1.0), (0.5 * denoised(X, V, 0.75)).tolist())
    assert step_std(Kernel(KernelKind.CPS, 1.0), 0.75, 0.5, 0.9) == 0.5


@clause("KERN-5")
def test_a_step_is_stochastic_where_its_std_is_positive():
    for kernel in (ODE, SDE, FLOW, CPS, Kernel(KernelKind.SDE, 0.0), Kernel(KernelKind.CPS, 0.0)):
        for sigma, after in ((1.0, 0.5), (0.5, 0.0)):
            assert kernel.is_stochastic(after) == (step_std(kernel, sigma, after, 0.9) > 0)
    assert not CPS.is_stochastic(0.0)
    assert SDE.is_stochastic(0.0)


@clause("KERN-5", "LOGP-3")
def test_the_branch_spread_does_not_scale_the_step():
    for spread in (0.0, 4.0, math.inf):
        plan = small_plan((0, 1), spread=spread)
        (tree,) = rollout(plan, Network(), PROMPT, CONDITION, Sampling(KeyedNoise(0), (2, 3)))
        assert {edge.std for edge in tree.level(1)} == {0.15}


@clause("KERN-6", "KERN-2", "KERN-3", "KERN-4")
@pytest.mark.parametrize("kernel", [ODE, SDE, FLOW, CPS], ids=lambda k: k.kind.value)
@pytest.mark.parametrize("step", [0, 1, 3])
def test_means_are_differentiable_in_state_and_velocity(kernel, step):
    plan = small_plan((), kernel=kernel, shift=3.0)
    x, v = X.clone().requires_grad_(), V.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, v: transition(plan, step, x, v)[0], (x, v))
    assert transition(plan, step, X.float(), V.float())[0].dtype == torch.float32


@clause("LOGP-1", "LOGP-2")
def test_the_example_edge():
    child, mean, std = f64(EDGE["child"]), f64(EDGE["mean"]), EDGE["std"]
    close((child - mean) / std, EDGE["z"])
    elements = [gaussian_log_density(child[i : i + 1], mean[i : i + 1], std, Reduction.SUM) for i in range(2)]
    close(torch.stack(elements), EDGE["elements"])
    close(gaussian_log_density(child, mean, std, Reduction.SUM), EDGE["sum"])
    close(gaussian_log_density(child, mean, std, Reduction.MEAN), EDGE["reduced_mean"])


@clause("LOGP-1")
@pytest.mark.parametrize("std", [1e-3, 0.3, 7.0])
def test_the_density_is_a_library_normal(std):
    x, mean = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, 3, 4), torch.full((2, 3, 4), 0.25).double()
    expected = torch.distributions.Normal(mean, std).log_prob(x)
    close(gaussian_log_density(x, mean, std, Reduction.SUM), expected.sum().item())
    close(gaussian_log_density(x, mean, std, Reduction.MEAN), expected.mean().item())


@clause("LOGP-1", "LOGP-3")
def test_log_probabilities_are_differentiable_in_the_mean():
    child, mean = f64([[0.1, -0.4], [2.0, 0.0]]), f64([[0.0, -0.1], [1.5, 0.3]]).requires_grad_()
    for reduction in Reduction:
        assert torch.autograd.gradcheck(lambda m, r=reduction: gaussian_log_density(child, m, 0.3, r), (mean,))


@clause("LOGP-3", "ROLL-5", "OBJ-1")
@pytest.mark.parametrize("storage", [torch.float64, torch.float32, torch.bfloat16])
def test_the_stored_child_is_scored(storage):
    (tree,) = rollout(
        small_plan((0,)), Network(), PROMPT, CONDITION, Sampling(KeyedNoise(0), (2, 3), storage_dtype=storage)
    )
    for edge in tree.edges():
        assert edge.state.dtype == storage
        assert edge.mean is not None
        assert torch.equal(edge.log_prob, gaussian_log_density(edge.state, edge.mean, edge.std, Reduction.MEAN))


@clause("LOGP-4")
def test_a_deterministic_edge_has_no_log_probability():
    plan = small_plan((1,), steps=3, output=LeafOutput.DENOISED, sde_steps=())
    (tree,) = rollout(plan, Network(), PROMPT, CONDITION, Sampling(KeyedNoise(0), (2, 3)))
    assert [[edge.log_prob is None for edge in tree.level(d)] for d in (1, 2, 3)] == [[True], [False] * 2, [True] * 2]
    assert plan.trainable_steps == (1,)


@clause("LOGP-5")
def test_sums_are_accumulated_in_float64():
    # 2²⁰ float32 elements with z = 1: a float32 sum of −½ − log std − ½ log 2π is off by far more than 1e-9 of it.
    child, mean = torch.full((2**20,), 1.5), torch.full((2**20,), 1.0)
    found = gaussian_log_density(child, mean, 0.5, Reduction.SUM)
    assert found.dtype == torch.float64
    element = -0.5 - math.log(0.5) - 0.5 * math.log(2 * math.pi)
    assert found.item() == pytest.approx(2**20 * element, rel=1e-12)
    # Both are widened before they are subtracted: in float32 1 − 2⁻²⁶ is 1.
    near = gaussian_log_density(torch.ones(1), torch.full((1,), 2.0**-26), 1.0, Reduction.SUM)
    assert near.item() == pytest.approx(-0.5 * (1 - 2.0**-26) ** 2 - 0.5 * math.log(2 * math.pi), rel=1e-12)


@clause("LOGP-6")
def test_path_log_probabilities_sum_the_edges_that_have_one():
    plan = small_plan((0, 1), steps=4, output=LeafOutput.DENOISED)
    (tree,) = rollout(plan, Network(), PROMPT, CONDITION, Sampling(KeyedNoise(0), (2, 3)))
    for leaf in tree.root.leaves():
        chain, node = [], leaf
        while node.parent is not None:
            chain.append(node)
            node = node.parent
        assert [edge.log_prob is None for edge in chain] == [True, False, False, False]
        total = sum(float(edge.log_prob) for edge in chain[1:])
        assert float(path_log_probability(leaf, tree.root)) == pytest.approx(total, rel=1e-14)
        assert float(path_log_probability(leaf, leaf)) == 0.0
        assert float(path_log_probability(leaf, chain[1])) == 0.0
        assert float(path_log_probability(leaf, chain[2])) == pytest.approx(float(chain[1].log_prob), rel=1e-14)
