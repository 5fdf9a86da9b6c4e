"""The exact Gaussian velocity as a model."""

import pytest
import torch

from branchgrpo.conformance.clauses import clause
from branchgrpo.models.gaussian import ExactGaussian
from branchgrpo.oracle.chain import affine_chain
from branchgrpo.oracle.gaussian import GaussianData, velocity_intercept, velocity_slope
from branchgrpo.oracle.laws import node_means, random_root
from branchgrpo.reference.errors import InputError, OptionError, PlanError
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Guidance, Prompt, TensorCondition, VelocityModel
from branchgrpo.reference.rollout import Sampling, rollout
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput

SIGMAS = shifted_schedule(6)
DATA = GaussianData(0.7, 0.5)


def blank(items):
    return TensorCondition({"none": torch.zeros(items, 1)})


@pytest.mark.parametrize("latent", [(), (5,), (2, 3, 4)])
@clause("ORACLE-2")
def test_velocity_is_the_oracles(latent):
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(5, *latent, dtype=torch.float64, generator=generator)
    sigma = torch.tensor([1.0, 0.9, 0.4, 0.01, 0.001], dtype=torch.float64)
    v = ExactGaussian(DATA.mean, DATA.tau)(x, sigma, blank(5))
    assert v.shape == x.shape
    for item, level in enumerate(sigma.tolist()):
        expected = velocity_slope(DATA, level) * x[item] + velocity_intercept(DATA, level)
        # 1e-13: the two forms add terms of size ≤ 10 in another order.
        torch.testing.assert_close(v[item], expected, rtol=1e-13, atol=1e-13)


def test_it_is_a_velocity_model():
    model: VelocityModel = ExactGaussian(0.0, 1.0)
    assert model.guidance == Guidance("none")
    # Standard normal data: v = (2σ − 1)/((1 − σ)² + σ²) · x, which is x at σ = 1 and 0 at σ = ½.
    x = torch.tensor([[2.0], [2.0], [2.0]])
    v = model(x, torch.tensor([1.0, 0.5, 0.25]), blank(3))
    torch.testing.assert_close(v, torch.tensor([[2.0], [0.0], [-1.6]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@clause("ORACLE-3")
def test_theta_is_added_at_its_step_only(dtype):
    model = ExactGaussian(0.7, 0.5, SIGMAS, latent_shape=(2, 3))
    base = ExactGaussian(0.7, 0.5)
    assert model.theta.shape == (6, 2, 3)
    assert [name for name, _ in model.named_parameters()] == ["theta"]
    with torch.no_grad():
        model.theta.copy_(torch.arange(36, dtype=torch.float64).reshape(6, 2, 3))
    order = [3, 0, 5, 0]
    sigma = torch.tensor([SIGMAS[i] for i in order], dtype=torch.float64).to(dtype)
    x = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(4, 2, 3).to(dtype)
    extra = model(x, sigma, blank(4)) - base(x, sigma, blank(4))
    assert extra.dtype is dtype
    torch.testing.assert_close(extra, model.theta[order].to(dtype), rtol=1e-5, atol=1e-5)
    model(x, sigma, blank(4)).sum().backward()
    touched = model.theta.grad.abs().sum(dim=(1, 2))
    torch.testing.assert_close(touched, torch.tensor([12.0, 0, 0, 6.0, 0, 6.0], dtype=torch.float64))


def test_gradcheck_in_state_and_theta():
    model = ExactGaussian(0.7, 0.5, SIGMAS, latent_shape=(2,))
    x = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    sigma = torch.tensor([SIGMAS[1], SIGMAS[4], SIGMAS[1]], dtype=torch.float64)

    def call(state, theta):
        return torch.func.functional_call(model, {"theta": theta}, (state, sigma, blank(3)))

    assert torch.autograd.gradcheck(call, (x, model.theta))


def test_a_conditional_mean_follows_its_item():
    model = ExactGaussian(0.5, 0.8, mean_key="mean")
    x = torch.randn(3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sigma = torch.full((3,), 0.6, dtype=torch.float64)
    offsets = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64)
    condition = TensorCondition({"mean": offsets})
    v = model(x, sigma, condition)
    for item, offset in enumerate(offsets.tolist()):
        single = ExactGaussian(0.5 + offset, 0.8)(x[item : item + 1], sigma[:1], blank(1))
        torch.testing.assert_close(v[item : item + 1], single, rtol=1e-14, atol=1e-14)
    swapped = model(x, sigma, condition.gather(torch.tensor([1, 0, 2])))
    assert not torch.allclose(swapped[0], v[0])
    torch.testing.assert_close(swapped[2], v[2], rtol=0, atol=0)
    elementwise = TensorCondition({"mean": offsets[:, None].expand(3, 2)[:, :, None].expand(3, 2, 2)})
    torch.testing.assert_close(model(x, sigma, elementwise), v, rtol=0, atol=0)


@clause("ORACLE-4")
def test_a_rollout_with_theta_follows_the_oracle():
    plan = Plan(SIGMAS, (Kernel(KernelKind.SDE, 0.3),) * 6, (1,) * 6, (4.0,) * 6, output=LeafOutput.SAMPLE)
    model = ExactGaussian(DATA.mean, DATA.tau, SIGMAS, latent_shape=(2, 40_000))
    theta = torch.tensor(
        [[0.4, -0.2], [0.1, 0.3], [-0.5, 0.2], [0.2, 0.2], [0.7, -0.3], [-0.1, 0.6]], dtype=torch.float64
    )
    with torch.no_grad():
        model.theta.copy_(theta[:, :, None].expand(6, 2, 40_000))
    (tree,) = rollout(plan, model, Prompt(1, ""), blank(1), Sampling(KeyedNoise(9), (2, 40_000)))
    leaf = tree.root.leaves()[0].state
    expected = node_means(affine_chain(plan, DATA), random_root(2), theta.numpy())[-1]
    # Five standard errors of each mean, √(V/n) with n = 40,000.
    error = 5 * leaf.std(dim=1) / 40_000**0.5
    assert bool((abs(leaf.mean(dim=1) - torch.from_numpy(expected)) < error).all())
    assert abs(expected[0] - expected[1]) > 20 * error.max()


def test_wrong_input_is_refused_by_name():
    with pytest.raises(OptionError, match=r"tau = 0.0: must be finite and > 0"):
        ExactGaussian(0.0, 0.0)
    with pytest.raises(OptionError, match=r"mean = nan: must be finite"):
        ExactGaussian(float("nan"), 1.0)
    with pytest.raises(OptionError, match=r"sigmas = None: must be the schedule"):
        ExactGaussian(0.0, 1.0, latent_shape=(2,))
    with pytest.raises(PlanError, match=r"sigmas\[0\] = 0.9: must be exactly 1"):
        ExactGaussian(0.0, 1.0, (0.9, 0.0))
    with pytest.raises(OptionError, match=r"sigmas = None"):
        ExactGaussian(0.0, 1.0).step_of(torch.ones(1))
    model = ExactGaussian(0.0, 1.0, SIGMAS, latent_shape=(2,))
    x = torch.zeros(2, 2, dtype=torch.float64)
    with pytest.raises(InputError, match=r"sigma\[1\] = 0.5: must be exactly one of"):
        model(x, torch.tensor([1.0, 0.5], dtype=torch.float64), blank(2))
    with pytest.raises(InputError, match=r"sigma\[0\] = 0.0: must be exactly one of"):
        model(x, torch.zeros(2, dtype=torch.float64), blank(2))
    with pytest.raises(InputError, match=r"len\(condition\) = 3: must be 2"):
        model(x, torch.ones(2, dtype=torch.float64), blank(3))
    with pytest.raises(InputError, match=r"condition = 'TensorCondition': must be a TensorCondition with 'mean'"):
        ExactGaussian(0.0, 1.0, mean_key="mean")(x, torch.ones(2, dtype=torch.float64), blank(2))
