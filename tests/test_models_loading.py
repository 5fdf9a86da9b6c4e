"""Loading, encoding through the cache, decoding, and what bad input is answered with."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from helpers_models import NEGATIVE, PROMPTS, first_frames, image, no_network, saved
from safetensors import safe_open

from branchgrpo.models.auto import load_backbone
from branchgrpo.models.backbone import Backbone
from branchgrpo.models.backbones.flux import Flux
from branchgrpo.models.backbones.stable_diffusion_3 import StableDiffusion3
from branchgrpo.models.folder import content_digest
from branchgrpo.models.lora import LoraOptions
from branchgrpo.models.options import LoadOptions
from branchgrpo.models.prompt_cache import PromptCache
from branchgrpo.reference.errors import InputError, ModelError, OptionError, PlanError
from branchgrpo.reference.protocols import Guidance, TensorCondition

SHORT = 24  # tokens of a prompt: enough for the tests' prompts
VIDEO = (5, 32, 16)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture
def copy_of(root: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a pipeline folder, to be damaged."""
    return lambda kind: Path(shutil.copytree(saved(kind, root), tmp_path / "copy"))


def refuse(*_: object) -> None:
    raise AssertionError("loaded an encoder")


# ---- the cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["flux", "sd3", "qwen", "wan2.1", "wan2.1-i2v"])
def test_cached_prompts_need_no_encoder(kind: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, more = LoadOptions(cache=tmp_path / "cache", max_sequence_length=SHORT), first_frames(kind, VIDEO, 2)
    model = load_backbone(saved(kind, root), options=options)
    first = model.encode(PROMPTS[:2], negative=NEGATIVE, **more)
    model = load_backbone(saved(kind, root), options=options)
    monkeypatch.setattr(type(model), "text_pipeline", refuse)
    monkeypatch.setattr(type(model), "image_pipeline", refuse, raising=False)
    again = model.encode(PROMPTS[:2], negative=NEGATIVE, **more)
    assert first.tensors.keys() == again.tensors.keys()
    assert all(torch.equal(first.tensors[name], again.tensors[name]) for name in first.tensors)
    with pytest.raises(AssertionError, match="loaded an encoder"):
        model.encode([PROMPTS[2]], negative=NEGATIVE, **first_frames(kind, VIDEO, 1))


def test_a_cached_prompt_does_not_depend_on_its_batch(root: Path) -> None:
    model = load_backbone(saved("qwen", root), options=LoadOptions(max_sequence_length=SHORT))
    alone, together = model.encode([PROMPTS[0]]), model.encode(list(PROMPTS))
    length = int(alone.tensors["text_length"])
    assert torch.equal(alone.tensors["text"][0], together.tensors["text"][0, :length])
    assert torch.count_nonzero(together.tensors["text"][0, length:]) == 0
    assert len({int(n) for n in together.tensors["text_length"]}) > 1


def test_cache_files_name_their_prompt_and_their_encoders(
    copy_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of other encoder weights, or of another length, are not reused."""
    folder, options = copy_of("flux"), LoadOptions(cache=tmp_path / "cache", max_sequence_length=SHORT)
    load_backbone(folder, options=options).encode([PROMPTS[0]])
    files = list((tmp_path / "cache").rglob("*"))
    entry = next(f for f in files if f.suffix == ".safetensors")
    with safe_open(entry, framework="pt") as file:
        assert file.metadata()["content"] == PROMPTS[0]
    assert not [f for f in files if f.suffix == ".part"]
    monkeypatch.setattr(Backbone, "text_pipeline", refuse)
    load_backbone(folder, options=options).encode([PROMPTS[0]])
    with pytest.raises(AssertionError, match="loaded an encoder"):
        load_backbone(folder, options=LoadOptions(cache=tmp_path / "cache")).encode([PROMPTS[0]])
    config = folder / "text_encoder_2" / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(AssertionError, match="loaded an encoder"):
        load_backbone(folder, options=options).encode([PROMPTS[0]])


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match=r"prompt cache = .*file': must be a folder that can be written"):
        PromptCache(tmp_path / "file").put("0" * 64, {"x": torch.zeros(1)}, "a cat")


def test_a_damaged_cache_file_is_named(root: Path, tmp_path: Path) -> None:
    options = LoadOptions(cache=tmp_path, max_sequence_length=SHORT)
    load_backbone(saved("flux", root), options=options).encode([PROMPTS[0]])
    entry = next(tmp_path.rglob("*.safetensors"))
    entry.write_bytes(entry.read_bytes()[:40])
    with pytest.raises(InputError, match=entry.name):
        load_backbone(saved("flux", root), options=options).encode([PROMPTS[0]])


# ---- decoding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["flux", "qwen", "wan2.1"])
def test_decoding_does_not_depend_on_chunks_or_slices(kind: str, root: Path) -> None:
    frames = 5 if kind == "wan2.1" else 1
    models = [
        load_backbone(
            saved(kind, root), options=LoadOptions(decode_chunk=chunk, vae_slicing=slicing, vae_dtype=torch.float64)
        )
        for chunk, slicing in ((3, False), (2, False), (3, True))
    ]
    latents = torch.randn(3, *models[0].latent_shape(32, 16, frames), generator=torch.Generator().manual_seed(0))
    samples = [model.decode(latents) for model in models]
    assert samples[0].shape == ((3, 5, 3, 32, 16) if frames > 1 else (3, 3, 32, 16))
    assert models[2].vae.use_slicing
    for other in samples[1:]:
        torch.testing.assert_close(samples[0], other, rtol=0, atol=1e-6)  # samples are handed out in float32


def test_tiled_decoding_starts_with_the_tile_alone(root: Path) -> None:
    """An image of several tiles: the first corner, before any blending, is the first tile decoded by itself."""
    plain = load_backbone(saved("sd3", root))
    tiled = load_backbone(saved("sd3", root), options=LoadOptions(vae_tiling=True))
    latents = torch.randn(1, 4, 24, 24, generator=torch.Generator().manual_seed(0))
    tile = tiled.vae.tile_latent_min_size
    assert tile < 24
    sample, corner = tiled.decode(latents), plain.decode(latents[..., :tile, :tile])
    assert sample.shape == (1, 3, 48, 48)
    assert torch.equal(sample[..., :8, :8], corner[..., :8, :8])
    assert not torch.equal(sample, plain.decode(latents))


def test_a_sample_that_is_not_finite_is_an_error(root: Path) -> None:
    model = load_backbone(saved("sd3", root))
    with pytest.raises(ModelError, match="decoded samples"):
        model.decode(torch.full((1, 4, 8, 8), float("nan")))


def test_the_vae_is_no_parameter_of_the_backbone(root: Path) -> None:
    model = load_backbone(saved("sd3", root))
    names = set(model.state_dict())
    model.decode(torch.zeros(1, 4, 8, 8))
    assert set(model.state_dict()) == names
    assert all(name.startswith("transformer.") for name in names)
    assert not any(p.requires_grad for p in model.vae.parameters())


# ---- the network ---------------------------------------------------------------------------------------------------


def test_a_local_folder_never_reaches_for_the_network(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    folder = saved("wan2.1-i2v", root)
    with no_network():
        model = load_backbone(folder, lora=LoraOptions(rank=2), options=LoadOptions(max_sequence_length=SHORT))
        condition = model.encode([PROMPTS[0]], negative=NEGATIVE, **first_frames("wan2.1-i2v", VIDEO, 1))
        shape = model.latent_shape(32, 16, 5)
        model.decode(model(torch.zeros(1, *shape), torch.ones(1), condition).detach())
        model.save_lora(tmp_path)
        model.load_lora(tmp_path)
        assert model.schedule(3, shape)[0] == 1.0


def test_a_hub_id_is_downloaded_once_and_then_local(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(hub_id: str) -> str:
        asked.append(hub_id)
        return str(saved("flux", root))

    monkeypatch.setattr("diffusers.DiffusionPipeline.download", download)
    with no_network():
        assert isinstance(load_backbone("some-body/some-model"), Flux)
    assert asked == ["some-body/some-model"]


def test_a_hub_id_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str) -> str:
        raise OSError(f"no {hub_id} in the cache")

    monkeypatch.setattr("diffusers.DiffusionPipeline.download", download)
    with pytest.raises(InputError, match="nobody/nothing"):
        load_backbone("nobody/nothing")


def test_a_file_of_the_hubs_cache_is_known_by_its_name(tmp_path: Path) -> None:
    """The name of a blob is the SHA-256 of its content: a copied folder and the cache have one fingerprint."""
    content, blobs = b"weights", tmp_path / "blobs"
    blobs.mkdir()
    blob = blobs / hashlib.sha256(content).hexdigest()
    blob.write_bytes(content)
    link, copy = tmp_path / "model.safetensors", tmp_path / "copy.safetensors"
    link.symlink_to(blob)
    copy.write_bytes(content)
    assert content_digest(link) == content_digest(copy) == hashlib.sha256(content).digest()
    blob.write_bytes(b"not read again")
    assert content_digest(link) == content_digest(copy)


# ---- the schedule --------------------------------------------------------------------------------------------------


def test_a_multistep_solver_gives_the_euler_schedule_of_its_shift(copy_of: Callable[[str], Path]) -> None:
    """Published Wan folders ship UniPC: people swap in Euler with its shift, and so do we."""
    folder = copy_of("wan2.1")
    UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=5.0, prediction_type="flow_prediction").save_pretrained(
        folder / "scheduler"
    )
    edit_index(folder, scheduler=["diffusers", "UniPCMultistepScheduler"])
    model = load_backbone(folder)
    euler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    euler.set_timesteps(6)
    assert model.schedule(6, model.latent_shape(16, 16)) == tuple(euler.sigmas.tolist())
    with pytest.raises(PlanError, match="steps"):
        model.schedule(0, model.latent_shape(16, 16))


def test_a_scheduler_that_is_not_of_flow_matching_is_an_error(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("sd3")
    DDIMScheduler().save_pretrained(folder / "scheduler")
    edit_index(folder, scheduler=["diffusers", "DDIMScheduler"])
    model = load_backbone(folder)
    with pytest.raises(InputError, match=r"DDIMScheduler.*FlowMatchEulerDiscreteScheduler"):
        model.schedule(4, model.latent_shape(16, 16))


# ---- bad input -----------------------------------------------------------------------------------------------------


def edit_index(folder: Path, **changes: object) -> Path:
    path = folder / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def without(folder: Path, name: str) -> Path:
    shutil.rmtree(folder / name)
    return folder


DAMAGE: dict[str, tuple[str, Callable[[Path], object], tuple[str, ...]]] = {
    "no folder": ("flux", lambda f: f / "nowhere", ("nowhere", "existing folder")),
    "a component's folder": ("flux", lambda f: f / "vae", ("vae", "model_index.json", "config.json")),
    "a file": ("flux", lambda f: f / "model_index.json", ("model_index.json", "a file")),
    "not JSON": ("flux", lambda f: (f / "model_index.json").write_text("{") and f, ("valid JSON",)),
    "no class": ("flux", lambda f: (f / "model_index.json").write_text("{}") and f, ("_class_name",)),
    "unsupported pipeline": (
        "flux",
        lambda f: edit_index(f, _class_name="StableDiffusionPipeline"),
        ("StableDiffusionPipeline", "FluxPipeline", "WanPipeline"),
    ),
    "unsupported network": (
        "sd3",
        lambda f: edit_index(f, transformer=["diffusers", "DiTTransformer2DModel"]),
        ("DiTTransformer2DModel", "SD3Transformer2DModel"),
    ),
    "no VAE": ("qwen", lambda f: without(f, "vae"), ("component vae", "missing", "AutoencoderKLQwenImage")),
    "no transformer": ("wan2.1", lambda f: without(f, "transformer"), ("component transformer", "missing")),
    "unlisted transformer": ("wan2.1", lambda f: edit_index(f, transformer=[None, None]), ("transformer", "lists")),
    "no text encoder": ("flux", lambda f: without(f, "text_encoder_2"), ("component text_encoder_2", "T5EncoderModel")),
    "no second expert": ("wan2.2", lambda f: without(f, "transformer_2"), ("component transformer_2", "missing")),
    "boundary alone": (
        "wan2.2",
        lambda f: edit_index(f, transformer_2=[None, None]),
        ("boundary_ratio, transformer_2", "both, or neither"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_wrong_folder_is_answered_by_what_was_found_and_what_is_needed(
    damage: str, copy_of: Callable[[str], Path]
) -> None:
    kind, act, words = DAMAGE[damage]
    source = act(copy_of(kind))
    with no_network(), pytest.raises(InputError) as caught:
        load_backbone(source)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_folder_of_another_family_is_refused(root: Path) -> None:
    with pytest.raises(InputError, match=r"FluxPipeline.*StableDiffusion3Pipeline"):
        StableDiffusion3.from_pretrained(saved("flux", root))


OPTIONS: dict[str, tuple[str, dict[str, object], str]] = {
    "embedded guidance without an embedding": ("sd3", {"guidance": Guidance("embedded", 3.0)}, "guidance.kind"),
    "no guidance for weights that read one": ("flux", {"guidance": Guidance()}, "guidance.kind"),
    "embedded guidance for schnell": ("flux-schnell", {"guidance": Guidance("embedded", 3.0)}, "guidance.kind"),
    "scale": ("qwen", {"guidance": Guidance("classifier_free", float("nan"))}, "guidance.scale"),
    "unused scale": ("sd3", {"options": LoadOptions(low_noise_scale=2.0)}, "options.low_noise_scale"),
    "unused embedding": ("wan2.1", {"options": LoadOptions(embedded_scale=2.0)}, "options.embedded_scale"),
    "one expert": ("wan2.1", {"options": LoadOptions(low_noise_scale=2.0)}, "options.low_noise_scale"),
    "targets": ("flux", {"lora": LoraOptions(targets=("to_q", "to_nowhere"))}, "lora.targets = 'to_nowhere'"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_the_weights_cannot_follow_is_an_error(option: str, root: Path) -> None:
    kind, arguments, field = OPTIONS[option]
    with pytest.raises(OptionError) as caught:
        load_backbone(saved(kind, root), **arguments)
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: LoraOptions(rank=0), "lora.rank"),
        (lambda: LoraOptions(alpha=0), "lora.alpha"),
        (lambda: LoadOptions(decode_chunk=0), "options.decode_chunk"),
        (lambda: LoadOptions(max_sequence_length=0), "options.max_sequence_length"),
        (lambda: LoadOptions(vae_dtype=torch.int64), "options.vae_dtype"),
    ],
)
def test_options_are_checked_when_they_are_made(make: Callable[[], object], field: str) -> None:
    with pytest.raises(OptionError, match=field):
        make()


SIZES: dict[str, list[tuple[tuple[int, ...], str]]] = {
    "flux": [((18, 16), "height"), ((16, 18), "width"), ((0, 16), "height"), ((16, 16, 5), "frames")],
    "sd3": [((18, 16), "height"), ((16, 64), "latent width"), ((16, 16, 2), "frames")],
    "qwen": [((20, 16), "height"), ((16, 12), "width")],
    "wan2.1": [((24, 16, 5), "height"), ((16, 24, 5), "width"), ((16, 16, 4), "frames"), ((16, 16, 0), "frames")],
}


@pytest.mark.parametrize(("kind", "size", "field"), [(k, *row) for k, rows in SIZES.items() for row in rows])
def test_a_size_that_the_model_cannot_take_is_an_error(
    kind: str, size: tuple[int, ...], field: str, root: Path
) -> None:
    with pytest.raises(InputError) as caught:
        load_backbone(saved(kind, root)).latent_shape(*size)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("flux", (4, 8, 7)), ("flux", (3, 8, 8)), ("sd3", (4, 26, 8)), ("qwen", (1, 4, 8, 8)), ("wan2.1", (16, 8, 8)),
     ("wan2.1", (16, 33, 4, 4)), ("wan2.2-5b-i2v", (16, 1, 3, 4))],
)  # fmt: skip
def test_a_latent_that_the_network_cannot_take_is_an_error(kind: str, shape: tuple[int, ...], root: Path) -> None:
    model = load_backbone(saved(kind, root), options=LoadOptions(max_sequence_length=SHORT))
    condition = model.encode([PROMPTS[0]], negative=NEGATIVE, **first_frames(kind, (1, 16, 16), 1))
    with pytest.raises(InputError, match="latent"):
        model(torch.zeros(1, *shape), torch.ones(1), condition)


def test_the_condition_of_another_model_is_an_error(root: Path, copy_of: Callable[[str], Path]) -> None:
    options = LoadOptions(max_sequence_length=SHORT)
    flux = load_backbone(saved("flux", root), options=options)
    sd3 = load_backbone(saved("sd3", root), options=options)
    folder = copy_of("sd3")
    config = folder / "tokenizer_3" / "tokenizer_config.json"
    config.write_text(config.read_text() + "\n")
    other = load_backbone(folder, options=options)
    x, sigma, own = torch.zeros(1, 4, 8, 8), torch.ones(1), sd3.encode([PROMPTS[0]])
    bad: list[tuple[object, str]] = [
        (flux.encode([PROMPTS[0]]), "flux.*stable_diffusion_3"),
        (TensorCondition(own.tensors), "TensorCondition.*stable_diffusion_3"),
        (sd3.encode(list(PROMPTS)), r"\(3, 1\).*1, one an item"),
        (replace(own, tensors={**own.tensors, "text": own.tensors["text"][..., :48]}), "width 64"),
        (replace(own, tensors={"text": own.tensors["text"]}), "condition.pooled"),
        (replace(own, tensors={n: own.tensors[n] for n in ("text", "pooled")}), "negative prompt"),
        (other.encode([PROMPTS[0]]), "condition.fingerprint"),
    ]
    for condition, words in bad:
        with pytest.raises(InputError, match=words):
            sd3(x, sigma, condition)


def test_a_condition_of_another_size_or_without_an_image_is_an_error(root: Path) -> None:
    model = load_backbone(saved("wan2.1-i2v", root), options=LoadOptions(max_sequence_length=SHORT))
    small = model.encode([PROMPTS[0]], **first_frames("wan2.1-i2v", (1, 16, 16), 1))
    with pytest.raises(InputError, match=r"condition.frame = \(1, 20, 1, 2, 2\).*\(1, 20, 2, 4, 2\)"):
        model(torch.zeros(1, 16, 2, 4, 2), torch.ones(1), small)
    calls: list[Callable[[], object]] = [
        lambda: model.encode([PROMPTS[0]]),
        lambda: model.encode([PROMPTS[0]], images=[image(), image()], size=VIDEO),
        lambda: model.encode([PROMPTS[0]], images=[image()], size=(5, 30, 16)),
        lambda: model.encode([PROMPTS[0]], images=[image()]),
        lambda: load_backbone(saved("flux", root)).encode([PROMPTS[0]], images=[image()]),
        lambda: load_backbone(saved("flux", root)).encode([]),
        lambda: load_backbone(saved("flux", root)).encode(PROMPTS[0]),
    ]
    for call in calls:
        with pytest.raises(InputError):
            call()
