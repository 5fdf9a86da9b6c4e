"""The digits network as a VelocityModel, and its pretraining."""

import pytest
import torch

from branchgrpo.models.digits import NULL_LABEL, DigitsConfig, DigitsVelocity
from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.reference.protocols import Guidance, TensorCondition
from branchgrpo.training.digits_data import load_part
from branchgrpo.training.digits_generator import GeneratorConfig, flow_matching_loss, seeded_network, train_generator

SMALL = DigitsConfig(width=16, hidden=24, blocks=2, frequencies=4)
CFG = Guidance("classifier_free", 2.5)


def randomised(config=SMALL, guidance=None, dtype=torch.float64):
    """A network whose zero-initialised layers were filled too, so that every input matters."""
    generator = torch.Generator().manual_seed(1)
    model = DigitsVelocity(config, guidance).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=dtype))
    return model


def batch(items=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(items, 1, 8, 8, generator=generator, dtype=dtype)
    sigma = torch.rand(items, generator=generator, dtype=dtype)
    return x, sigma, TensorCondition({"label": torch.arange(items) % 10})


def test_default_network_has_the_stated_size():
    assert sum(p.numel() for p in DigitsVelocity().parameters()) == 389_440


@pytest.mark.parametrize("guidance", [None, CFG])
def test_a_batch_equals_its_items(guidance):
    model, (x, sigma, condition) = randomised(guidance=guidance), batch()
    together = model(x, sigma, condition)
    alone = torch.cat([model(x[i : i + 1], sigma[i : i + 1], condition.gather(torch.tensor([i]))) for i in range(7)])
    # rounding of sums over ≤ 64 terms in float64 is about 64 · 2⁻⁵³ ≈ 7e-15
    assert float((together - alone).detach().norm() / alone.detach().norm()) < 1e-12


def test_every_input_matters_an_item():
    model, (x, sigma, condition) = randomised(), batch()
    v = model(x, sigma, condition)
    other = TensorCondition({"label": (condition.tensors["label"] + 1) % 10})
    for changed in (model(x + 1.0, sigma, condition), model(x, 1.0 - sigma, condition), model(x, sigma, other)):
        assert bool(((changed - v).flatten(1).norm(dim=1) > 1e-3 * v.flatten(1).norm(dim=1)).all())


def test_guidance_is_the_stated_combination_with_gradients_through_both_branches():
    plain, guided, (x, sigma, condition) = randomised(), randomised(guidance=CFG), batch()
    null = TensorCondition({"label": torch.full((7,), NULL_LABEL)})
    conditional, unconditional = plain(x, sigma, condition), plain(x, sigma, null)
    expected = unconditional + CFG.scale * (conditional - unconditional)
    v = guided(x, sigma, condition)
    assert float((v - expected).detach().norm() / expected.detach().norm()) < 1e-12
    v.sum().backward()
    expected.sum().backward()
    assert float(guided.label.weight.grad[NULL_LABEL].norm()) > 0
    assert torch.allclose(guided.label.weight.grad, plain.label.weight.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_velocity_comes_back_in_the_dtype_and_shape_of_the_state(dtype):
    x, sigma, condition = batch(dtype=dtype)
    for weights in (torch.float32, torch.float64):
        v = randomised(dtype=weights)(x, sigma, condition)
        assert v.dtype == dtype
        assert v.shape == x.shape
    assert randomised()(x.flatten(1), sigma, condition).shape == (7, 64)


def test_inputs_that_do_not_match_are_refused():
    model, (x, sigma, condition) = randomised(), batch()
    labels = condition.tensors["label"]
    cases = [
        ((x[:, :, :4], sigma, condition), "x.shape"),
        ((x, sigma, condition.gather(torch.arange(6))), "condition.label"),
        ((x, sigma, TensorCondition({"label": labels.double()})), "condition.label"),
        ((x, sigma, TensorCondition({"label": labels + 5})), "condition.label"),
        ((x, sigma, TensorCondition({"text": labels})), "condition = 'TensorCondition'"),
    ]
    for arguments, field in cases:
        with pytest.raises(InputError, match=field):
            model(*arguments)


def test_options_are_checked():
    with pytest.raises(OptionError, match=r"digits\.blocks = 0"):
        DigitsConfig(blocks=0)
    with pytest.raises(OptionError, match=r"guidance\.kind = 'embedded'"):
        DigitsVelocity(SMALL, Guidance("embedded", 3.0))
    for bad in ({"steps": 0}, {"decay": 1.0}, {"label_dropout": -0.1}, {"learning_rate": 0.0}):
        with pytest.raises(OptionError, match=rf"generator\.{next(iter(bad))}"):
            GeneratorConfig(**bad)


def test_training_is_a_function_of_its_seed_and_leaves_the_global_generator_alone():
    config, data = GeneratorConfig(SMALL, steps=3, batch=8), load_part("generator")
    before, seen = torch.random.get_rng_state(), []
    first = train_generator(config, data, lambda done, total: seen.append((done, total)))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    again = train_generator(config, data)
    other = train_generator(GeneratorConfig(SMALL, steps=3, batch=8, seed=5), data)
    weights = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_training_lowers_the_flow_matching_loss():
    config = GeneratorConfig(DigitsConfig(width=32, hidden=64, blocks=2), steps=400, batch=64)
    data, large = load_part("generator"), GeneratorConfig(batch=2048)
    losses = [
        float(flow_matching_loss(model, data, large, torch.Generator().manual_seed(3)).detach())
        for model in (train_generator(config, data), seeded_network(config))
    ]
    # an untrained network predicts 0, whose loss is E‖ε − x⁰‖²/64 ≈ 1 + E x⁰² ≈ 1.7
    assert losses[0] < 0.6 * losses[1]
