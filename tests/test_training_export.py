"""What is exported is what was trained: others load it and get the same velocity."""

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from helpers_models import NEGATIVE, PROMPTS, ROWS, no_network, saved
from torch import Tensor

from branchgrpo.models.auto import load_backbone
from branchgrpo.models.backbone import Backbone
from branchgrpo.models.condition import EncodedCondition
from branchgrpo.models.digits import DigitsConfig, DigitsVelocity
from branchgrpo.models.lora import WEIGHTS, LoraOptions
from branchgrpo.models.options import LoadOptions
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Guidance, TensorCondition
from branchgrpo.training.checkpoint import export as export_code
from branchgrpo.training.checkpoint.errors import CheckpointError
from branchgrpo.training.checkpoint.export import export, load_digits


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


def loaded(folder: Path, lora: LoraOptions | None = None) -> Backbone:
    return load_backbone(folder, lora=lora, options=LoadOptions(max_sequence_length=16))


def batch(model: Backbone, kind: str) -> tuple[Tensor, Tensor, EncodedCondition]:
    """States on both sides of Wan's boundary."""
    shape = model.latent_shape(16, 16, ROWS[kind].size[0])
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(3))
    return x, torch.tensor([0.95, 0.4]), model.encode(PROMPTS[:2], negative=NEGATIVE)


def averages(model: torch.nn.Module, seed: int) -> dict[str, Tensor]:
    """Other weights than the model's, under the names of those that are trained."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


@torch.no_grad()
def put(model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        if name in weights:
            p.copy_(weights[name])


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("kind", ["flux", "wan2.2"])
def test_trained_weights_become_a_pipeline(kind: str, averaged: bool, root: Path, tmp_path: Path) -> None:
    model = loaded(saved(kind, root))
    untrained, call = loaded(saved(kind, root)), batch(model, kind)
    put(model, averages(model, 1))
    ema = averages(model, 2) if averaged else None
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    folder = tmp_path / "export"
    with no_network(), torch.no_grad():
        export(model, folder, ema)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        put(model, ema or {})
        wanted = model(*call)
        pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
        for name in untrained.experts:
            setattr(untrained, name, getattr(pipe, name))
        assert torch.equal(untrained(*call), wanted)
        again = loaded(folder)  # our own reading, encoders and all: conditions of both folders are the same
        assert torch.equal(again(*batch(again, kind)), wanted)
    assert (loaded(saved(kind, root))(*call) - wanted).abs().max() > 1e-3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export"]


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("kind", ["flux", "wan2.2"])
def test_an_adapter_is_read_by_the_pipeline(kind: str, averaged: bool, root: Path, tmp_path: Path) -> None:
    lora = LoraOptions(rank=3, alpha=12)
    model, bare = loaded(saved(kind, root), lora), loaded(saved(kind, root))
    call = batch(model, kind)
    put(model, averages(model, 1))
    ema = averages(model, 2) if averaged else None
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    folder = tmp_path / "export"
    with no_network(), torch.no_grad():
        export(model, folder, ema)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert (folder / WEIGHTS).is_file()
        put(model, ema or {})
        wanted = model(*call)
        other = loaded(saved(kind, root))
        other.load_lora(folder)
        assert torch.equal(other(*call), wanted)
        pipe = DiffusionPipeline.from_pretrained(saved(kind, root), local_files_only=True)
        pipe.load_lora_weights(folder)
        if kind == "wan2.2":
            pipe.load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)
        plain = bare(*call)
        for name in bare.experts:
            setattr(bare, name, getattr(pipe, name))
        torch.testing.assert_close(bare(*call), wanted, rtol=0, atol=1e-5)  # the pipeline may merge in other order
    assert (wanted - plain).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_digits_network_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    model = DigitsVelocity(DigitsConfig(width=8, hidden=9, blocks=2), Guidance("classifier_free", 1.5)).to(dtype)
    put(model, averages(model, 1))
    ema = {name: value.float() for name, value in averages(model, 2).items()}
    export(model, tmp_path / "export", ema)
    put(model, ema)
    again = load_digits(tmp_path / "export")
    x, condition = torch.randn(3, 1, 8, 8, dtype=dtype), TensorCondition({"label": torch.tensor([1, 2, 3])})
    call = (x, torch.tensor([0.1, 0.5, 0.9], dtype=dtype), condition)
    assert torch.equal(again(*call), model(*call))
    assert again.guidance == model.guidance
    assert again.config == model.config


def test_a_new_export_replaces_the_former_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "export"
    model = DigitsVelocity(DigitsConfig(width=8, hidden=9, blocks=1))
    export(model, folder)
    (folder / "old").write_text("of the former one")
    put(model, averages(model, 1))
    export(model, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "digits.safetensors"]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["export"]
    kept = (folder / "digits.safetensors").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_code, "write_digits", full)
    with pytest.raises(CheckpointError, match=r"export folder .*export.*No space left.*former export"):
        export(DigitsVelocity(DigitsConfig(width=8, hidden=9, blocks=1)), folder)
    assert (folder / "digits.safetensors").read_bytes() == kept
    assert sorted(p.name for p in folder.parent.iterdir()) == ["export"]


def test_large_files_are_linked_and_small_ones_copied(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy may be edited: the source must not change with it."""
    source = saved("flux", root)
    largest = max((source / "vae").iterdir(), key=lambda path: path.stat().st_size)
    monkeypatch.setattr(export_code, "LINKED", largest.stat().st_size)
    export(loaded(source), tmp_path / "export")
    assert (tmp_path / "export" / "vae" / largest.name).samefile(largest)
    assert not (tmp_path / "export" / "vae" / "config.json").samefile(source / "vae" / "config.json")

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(export_code.os, "link", refuse)
    export(loaded(source), tmp_path / "other")
    copied = tmp_path / "other" / "vae" / largest.name
    assert not copied.samefile(largest)
    assert copied.read_bytes() == largest.read_bytes()


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="network = 'Linear'"):
        export(torch.nn.Linear(1, 1), tmp_path / "export")
    with pytest.raises(InputError, match=r"ema = \['other'\]"):
        export(DigitsVelocity(DigitsConfig(width=8)), tmp_path / "export", {"other": torch.ones(1)})
    with pytest.raises(InputError, match="an export of the digits network"):
        load_digits(tmp_path)
    assert list(tmp_path.iterdir()) == []
