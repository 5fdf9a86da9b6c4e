"""The velocity of every backbone: what it depends on, and that a batch is nothing but its items."""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers_models import KINDS, NEGATIVE, PROMPTS, QUICK, ROWS, first_frames, saved

from branchgrpo.models.auto import load_backbone
from branchgrpo.models.backbone import Backbone
from branchgrpo.models.condition import EncodedCondition
from branchgrpo.models.options import LoadOptions

FELT = 1e-3
ROUNDING = 1e-12  # of the tensor's norm, in float64: algorithm-level parity of two evaluation orders


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


def size_of(kind: str) -> tuple[int, int, int]:
    return ROWS[kind].size


@cache
def loaded(kind: str, root: Path, scale: float = 3.0, **options: float) -> tuple[Backbone, EncodedCondition]:
    """A backbone in float64, and the three prompts encoded by it; shared by the tests, which do not change it."""
    guidance = replace(ROWS[kind].guidance, scale=scale)
    load = LoadOptions(max_sequence_length=24, **options)
    model = load_backbone(saved(kind, root), dtype=torch.float64, guidance=guidance, options=load)
    model.requires_grad_(False)
    return model, model.encode(list(PROMPTS), negative=NEGATIVE, **first_frames(kind, size_of(kind), 3))


def states(model: Backbone, kind: str, items: int, seed: int = 0) -> torch.Tensor:
    frames, height, width = size_of(kind)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(items, *model.latent_shape(height, width, frames), generator=generator, dtype=torch.float64)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("kind", QUICK)
def test_velocity_feels_prompt_noise_level_state_and_guidance(kind: str, root: Path) -> None:
    model, condition = loaded(kind, root)
    x, sigma = states(model, kind, 1), torch.tensor([0.7], dtype=torch.float64)
    first = condition.gather(torch.tensor([0]))
    v = model(x, sigma, first)
    assert v.shape == x.shape
    assert v.dtype == torch.float64
    assert torch.isfinite(v).all()
    other = states(model, kind, 1, seed=1)
    assert distance(v, model(other, sigma, first)) > FELT
    tensors = {**first.tensors, **{n: t for n, t in condition.gather(torch.tensor([1])).tensors.items() if "text" in n}}
    assert distance(v, model(x, sigma, replace(first, tensors=tensors))) > FELT
    assert distance(v, model(x, sigma - 0.01, first)) > FELT
    if model.config.get("guidance_embeds") or model.guidance.kind == "classifier_free":
        assert distance(v, loaded(kind, root, scale=6.0)[0](x, sigma, first)) > FELT


@pytest.mark.parametrize("kind", QUICK)
def test_time_is_never_truncated(kind: str, root: Path) -> None:
    """Noise levels that share a whole number of 1000·σ give velocities of their own."""
    model, condition = loaded(kind, root)
    x, first = states(model, kind, 1), condition.gather(torch.tensor([0]))
    levels = [torch.tensor([(500 + part) / 1000], dtype=torch.float64) for part in (0.1, 0.5, 0.9)]
    v = [model(x, sigma, first) for sigma in levels]
    assert distance(v[0], v[1]) > FELT
    assert distance(v[1], v[2]) > FELT


@pytest.mark.parametrize("kind", ["flux", "sd3", "qwen", "wan2.1"])
def test_velocity_feels_the_size(kind: str, root: Path) -> None:
    """The same corner of a larger latent has another velocity: positions and attention see the rest."""
    model, condition = loaded(kind, root)
    frames, height, width = size_of(kind)
    small, first = states(model, kind, 1), condition.gather(torch.tensor([0]))
    generator = torch.Generator().manual_seed(2)
    for shape in (model.latent_shape(height, 2 * width, frames), model.latent_shape(2 * height, width, frames)):
        large = torch.randn(1, *shape, generator=generator, dtype=torch.float64)
        corner = tuple(slice(0, n) for n in small.shape)
        large[corner] = small
        sigma = torch.tensor([0.6], dtype=torch.float64)
        assert distance(model(small, sigma, first), model(large, sigma, first)[corner]) > FELT


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "flux"])
def test_velocity_feels_the_negative_prompt(kind: str, root: Path) -> None:
    model, condition = loaded(kind, root)
    changed = model.encode(list(PROMPTS), negative=PROMPTS[0], **first_frames(kind, size_of(kind), 3))
    x, sigma = states(model, kind, 3), torch.full((3,), 0.5, dtype=torch.float64)
    assert distance(model(x, sigma, condition), model(x, sigma, changed)) > FELT


@pytest.mark.parametrize("kind", ["wan2.1-i2v", "wan2.2-i2v", "wan2.2-5b-i2v"])
def test_velocity_feels_the_first_frame(kind: str, root: Path) -> None:
    model, condition = loaded(kind, root)
    swapped = condition.gather(torch.tensor([1, 2, 0]))
    keep = {n: t for n, t in condition.tensors.items() if "text" in n}
    changed = replace(condition, tensors={**swapped.tensors, **keep})
    x, sigma = states(model, kind, 3), torch.full((3,), 0.5, dtype=torch.float64)
    a, b = model(x, sigma, condition), model(x, sigma, changed)
    assert distance(a[:, :, 1:], b[:, :, 1:]) > FELT


def test_experts_take_the_items_of_their_noise_levels(root: Path) -> None:
    """Wan 2.2: at and above the boundary one expert and scale, below it the other, inside one call."""
    model, condition = loaded("wan2.2", root, low_noise_scale=1.5)
    x, boundary = states(model, "wan2.2", 1).expand(3, -1, -1, -1, -1), 0.875
    sigma = torch.tensor([boundary, boundary - 1e-6, 0.2], dtype=torch.float64)
    mixed = model(x, sigma, condition)
    high, low = (deepcopy(loaded("wan2.1", root, scale=scale)[0]) for scale in (3.0, 1.5))
    low.transformer.load_state_dict(model.experts["transformer_2"].state_dict())
    high.transformer.load_state_dict(model.experts["transformer"].state_dict())
    norm, condition = mixed.norm(), replace(condition, fingerprint=high.source)
    assert (mixed[:1] - high(x[:1], sigma[:1], condition.gather(torch.tensor([0])))).norm() <= ROUNDING * norm
    assert (mixed[1:] - low(x[1:], sigma[1:], condition.gather(torch.tensor([1, 2])))).norm() <= ROUNDING * norm
    assert distance(mixed[:1], low(x[:1], sigma[:1], condition.gather(torch.tensor([0])))) > FELT


@pytest.mark.parametrize("kind", KINDS)
def test_batched_chunked_shuffled_and_single_calls_agree(kind: str, root: Path) -> None:
    model, condition = loaded(kind, root)
    items = torch.tensor([0, 2, 1, 1, 0])
    x, many = states(model, kind, 5), condition.gather(items)
    sigma = torch.tensor([1.0, 0.95, 0.5, 0.3, 0.02], dtype=torch.float64)
    batched = model(x, sigma, many)
    limit = ROUNDING * batched.norm()

    def part(index: torch.Tensor) -> torch.Tensor:
        return model(x[index], sigma[index], condition.gather(items[index]))

    single = torch.cat([part(torch.tensor([i])) for i in range(5)])
    chunked = torch.cat([part(torch.tensor([0, 1])), part(torch.tensor([2, 3, 4]))])
    order = torch.tensor([3, 0, 4, 2, 1])
    shuffled = torch.empty_like(batched)
    shuffled[order] = part(order)
    for other in (single, chunked, shuffled, model(x, sigma, many)):
        assert (batched - other).norm() <= limit


@pytest.mark.parametrize("kind", ["flux", "qwen", "wan2.2-5b-i2v"])
def test_low_precision_network_behind_a_precise_state(kind: str, root: Path) -> None:
    """A bfloat16 network takes float32 states, returns float32 velocities and stays near the precise one."""
    precise, _ = loaded(kind, root, scale=2.0)
    model = load_backbone(saved(kind, root), dtype=torch.bfloat16, guidance=precise.guidance, options=precise.options)
    condition = model.encode(list(PROMPTS), negative=NEGATIVE, **first_frames(kind, size_of(kind), 3))
    # 2000, 500, 250, 125 are exact in bfloat16: FLUX and Qwen-Image round time and guidance to their dtype themselves
    x, sigma = states(model, kind, 3).float(), torch.tensor([0.5, 0.25, 0.125])
    v = model(x, sigma, condition)
    assert v.dtype == torch.float32
    # eight bits of mantissa through two blocks and a guidance of 3: a few per cent, far from the 100 % of a wrong input
    wanted = precise(x.double(), sigma.double(), condition.to(dtype=torch.float64))
    assert (v.double() - wanted).norm() < 0.15 * wanted.norm()


def test_fixed_first_frame_ends_at_the_image_whatever_the_weights(root: Path) -> None:
    """Wan TI2V: the first latent frame moves straight to the encoded image, and feels no parameter."""
    model, condition = deepcopy(loaded("wan2.2-5b-i2v", root))
    x = states(model, "wan2.2-5b-i2v", 3)
    sigma = torch.tensor([0.8, 0.4, 0.1], dtype=torch.float64)
    model.requires_grad_(True)
    v = model(x, sigma, condition)
    end = x - sigma.view(-1, 1, 1, 1, 1) * v
    torch.testing.assert_close(end[:, :, :1].detach(), condition.tensors["frame"].double(), rtol=0, atol=1e-12)
    grads = torch.autograd.grad(v[:, :, :1].sum(), model.transformer.proj_out.weight, retain_graph=True)
    assert torch.count_nonzero(grads[0]) == 0
    assert torch.count_nonzero(torch.autograd.grad(v.sum(), model.transformer.proj_out.weight)[0]) > 0


def test_guidance_has_gradients_through_both_branches(root: Path) -> None:
    model, condition = loaded("sd3", root)
    leaves = {n: t.detach().requires_grad_() for n, t in condition.tensors.items()}
    v = model(states(model, "sd3", 3), torch.full((3,), 0.5, dtype=torch.float64), replace(condition, tensors=leaves))
    v.sum().backward()
    assert all(torch.count_nonzero(leaf.grad) > 0 for leaf in leaves.values())
