"""Low-rank adapters: nothing else is trained, the reference policy is exact, and what is saved is what was trained."""

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from helpers_models import NEGATIVE, PROMPTS, QUICK, ROWS, first_frames, saved
from safetensors.torch import load_file, save_file

from branchgrpo.models.auto import load_backbone
from branchgrpo.models.backbone import Backbone
from branchgrpo.models.condition import EncodedCondition
from branchgrpo.models.lora import WEIGHTS, LoraOptions
from branchgrpo.models.options import LoadOptions
from branchgrpo.reference.errors import InputError, OptionError

LORA = LoraOptions(rank=3, alpha=12)  # a scale of 4: lost metadata would show


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


def loaded(kind: str, root: Path, lora: LoraOptions | None = LORA, dtype: torch.dtype = torch.float32) -> Backbone:
    return load_backbone(saved(kind, root), dtype=dtype, lora=lora, options=LoadOptions(max_sequence_length=16))


def batch(model: Backbone, kind: str) -> tuple[torch.Tensor, torch.Tensor, EncodedCondition]:
    """States on both sides of Wan's boundary, so that both experts are asked."""
    size = (ROWS[kind].size[0], 16, 16)
    shape = model.latent_shape(size[1], size[2], size[0])
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(3))
    return x, torch.tensor([0.95, 0.4]), model.encode(PROMPTS[:2], negative=NEGATIVE, **first_frames(kind, size, 2))


def train(model: Backbone, kind: str, steps: int = 3) -> None:
    """Move the velocity towards zero: the first step moves the zero half of the adapter, the next ones both."""
    parameters = [p for _, p in model.trainable_parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)
    x, sigma, condition = batch(model, kind)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x, sigma, condition).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", QUICK)
def test_only_the_adapter_is_trained_and_the_rest_stays_bit_identical(kind: str, root: Path) -> None:
    model = loaded(kind, root)
    model.decode(torch.zeros(1, *model.latent_shape(16, 16)))
    vae = {name: p.clone() for name, p in model.vae.state_dict().items()}
    before = {name: p.detach().clone() for name, p in model.state_dict().items()}
    trainable = {name for name, _ in model.trainable_parameters()}
    assert trainable == {name for name in before if "lora_" in name}
    assert all(any(name.startswith(expert) for name in trainable) for expert in model.experts)
    train(model, kind)
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (name not in trainable), name
    assert all(torch.equal(p, model.vae.state_dict()[name]) for name, p in vae.items())


@pytest.mark.parametrize("kind", QUICK)
def test_the_reference_policy_is_the_model_without_its_adapter(kind: str, root: Path) -> None:
    model, plain = loaded(kind, root), loaded(kind, root, lora=None)
    call = batch(plain, kind)
    with torch.no_grad():
        start = plain(*call)
        assert torch.equal(model(*call), start)  # a fresh adapter changes nothing
        train_before = model.reference()(*call)
        assert torch.equal(train_before, start)
    with torch.enable_grad():
        train(model, kind)
    reference = model.reference()
    assert torch.equal(reference(*call), start)
    assert not reference(*call).requires_grad
    assert reference.guidance == model.guidance
    trained = model(*call)
    assert trained.requires_grad  # the adapter is back
    assert (trained - start).abs().max() > 1e-3


def test_a_reference_call_between_forward_and_backward_leaves_the_gradient_alone(root: Path) -> None:
    model = loaded("flux", root)
    train(model, "flux")
    call, gradients = batch(model, "flux"), []
    for asks in (False, True):
        model.zero_grad()
        v = model(*call)
        if asks:
            model.reference()(*call)
        v.square().mean().backward()
        gradients.append([p.grad.clone() for _, p in model.trainable_parameters()])
    assert gradients[0]
    assert all(torch.equal(a, b) and torch.count_nonzero(a) for a, b in zip(*gradients, strict=True))


def test_the_adapter_is_back_after_an_error(root: Path) -> None:
    model = loaded("sd3", root)
    train(model, "sd3")
    call = batch(model, "sd3")
    wanted = model(*call)
    with pytest.raises(InputError):
        model.reference()(call[0], call[1], call[2].gather(torch.tensor([0])))
    assert torch.equal(model(*call), wanted)


@pytest.mark.parametrize("kind", QUICK)
def test_a_saved_adapter_is_read_back_by_us_and_by_the_pipeline(kind: str, root: Path, tmp_path: Path) -> None:
    model = loaded(kind, root)
    train(model, kind)
    model.save_lora(tmp_path)
    call = batch(model, kind)
    with torch.no_grad():
        wanted = model(*call)
        for lora in (None, LoraOptions(rank=5, alpha=5)):  # into a bare network, and over another adapter
            other = loaded(kind, root, lora=lora)
            assert (other(*call) - wanted).abs().max() > 1e-3
            other.load_lora(tmp_path)
            assert torch.equal(other(*call), wanted)
            assert {n for n, _ in other.trainable_parameters()} == {n for n, _ in model.trainable_parameters()}
        pipe = DiffusionPipeline.from_pretrained(saved(kind, root), local_files_only=True)
        pipe.load_lora_weights(tmp_path)
        if kind == "wan2.2":
            pipe.load_lora_weights(tmp_path / "transformer_2", load_into_transformer_2=True)
        bare = loaded(kind, root, lora=None)
        for name in bare.experts:
            setattr(bare, name, getattr(pipe, name))
        torch.testing.assert_close(
            bare(*call), wanted, rtol=0, atol=1e-5
        )  # float32; the pipeline may merge in other order


def test_an_adapter_without_its_metadata_is_refused(root: Path, tmp_path: Path) -> None:
    """The scale alpha / rank lives in the metadata: without it the weights mean something else."""
    model = loaded("flux", root)
    model.save_lora(tmp_path)
    save_file(load_file(tmp_path / WEIGHTS), tmp_path / WEIGHTS)
    with pytest.raises(InputError, match="metadata"):
        model.load_lora(tmp_path)
    with pytest.raises(InputError, match=WEIGHTS):
        model.load_lora(tmp_path / "nowhere")


def test_without_an_adapter_there_is_nothing_to_save_and_no_reference(root: Path, tmp_path: Path) -> None:
    model = loaded("flux", root, lora=None)
    with pytest.raises(OptionError, match="lora"):
        model.save_lora(tmp_path)
    with pytest.raises(OptionError, match="its own weights"):
        model.reference()(*batch(model, "flux"))
    assert all(p.requires_grad for p in model.parameters())


def test_the_adapter_of_a_low_precision_network_is_kept_in_float32(root: Path) -> None:
    model = loaded("qwen", root, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert {p.dtype for _, p in model.trainable_parameters()} == {torch.float32}
    train(model, "qwen")
    assert {p.dtype for _, p in model.trainable_parameters()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["flux", "wan2.2"])
def test_gradient_checkpointing_changes_no_gradient(kind: str, root: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        options = LoadOptions(max_sequence_length=16, gradient_checkpointing=checkpointing)
        model = load_backbone(saved(kind, root), options=options, dtype=torch.float64)
        assert model.transformer.is_gradient_checkpointing == checkpointing
        x, sigma, condition = batch(model, kind)
        model(x.double(), sigma.double(), condition).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for _, p in model.trainable_parameters() if p.grad is not None]))
    assert (gradients[0] - gradients[1]).norm() <= 1e-12 * gradients[0].norm()  # float64 rounding
