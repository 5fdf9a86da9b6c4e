"""Forecasts: arithmetic against PyTorch's counter, weights and activations against the real modules, known totals."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_cli import assert_one_line_error, branchgrpo
from helpers_planner import CASES, ITEMS, TEXT, counted_flops, digits_network, saved_bytes
from peft import LoraConfig
from torch import nn

from branchgrpo.cli.main import main
from branchgrpo.cli.planner_tables import MEMORY_MEANING, PLANNER_MEANING
from branchgrpo.models import lora
from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.reference.presets import PRESETS, preset
from branchgrpo.training.planner import architectures
from branchgrpo.training.planner.architectures import DIGITS, FAMILIES, KNOWN, architecture
from branchgrpo.training.planner.forecast import backbone_of, forecast
from branchgrpo.training.planner.network import Adapters, Network
from branchgrpo.training.planner.setup import Setup

VARIANTS = ("flux-schnell", "wan-no-cross-norm", "sd3")
"""Of another row, and left out of the quick run."""
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in CASES]
RANK = 8
FLUX = Setup("flux.1-dev", height=720, width=720)


def network_of(name: str) -> Network:
    case = CASES[name]
    return FAMILIES[case.kind].network(case.build().config, case.image, TEXT)


def adapted(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Adapters]:
    """A network with adapters as a run attaches them, and their description."""
    case = CASES[name]
    model, targets = case.build(dtype), FAMILIES[case.kind].targets
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(targets), exclude_modules=case.unread))
    lora.full_precision(model)
    return model, Adapters(RANK, targets)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_module(name: str):
    model, adapters = adapted(name)
    base = sum(p.numel() for key, p in CASES[name].build().named_parameters())
    assert network_of(name).parameters == base
    assert network_of(name).adapted(adapters) == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "billions"),
    # As the model cards round them; SD3.5-medium's card counts its table of positions, a buffer, as well.
    [("flux.1-dev", 11.90), ("sd3.5-medium", 2.24), ("sd3.5-large", 8.06), ("qwen-image", 20.43),
     ("wan2.1-1.3b", 1.42), ("wan2.1-14b", 14.29), ("sd3-medium", 2.03)],
)  # fmt: skip
def test_weights_of_the_published_networks(name: str, billions: float):
    import diffusers

    found = KNOWN[name]
    own = found.family.network(found.config, 1024, 128).parameters
    with torch.device("meta"):
        model = getattr(diffusers, found.kind)(**found.config)
    assert own == sum(p.numel() for p in model.parameters())
    assert own / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_arithmetic_is_what_pytorch_counts(name: str):
    own = network_of(name)
    forward, backward = counted_flops(CASES[name].call, CASES[name].build())
    assert (forward, backward) == (ITEMS * own.forward(), ITEMS * own.backward())


@pytest.mark.parametrize("name", NAMES)
def test_arithmetic_of_adapters_is_what_pytorch_counts(name: str):
    model, adapters = adapted(name)
    forward, backward = counted_flops(CASES[name].call, model)
    assert forward == ITEMS * network_of(name).forward(adapters)
    # Nothing flows to what lies before the first adapter: one block's projections of four, or of five, less.
    assert 0.94 <= backward / (ITEMS * network_of(name).backward(adapters)) <= 1.0


@pytest.mark.parametrize("name", NAMES)
def test_activations_are_what_autograd_keeps(name: str):
    own, case = network_of(name), CASES[name]
    kept = saved_bytes(case.call, case.build(), torch.float32) / ITEMS
    # Above: on a CPU the norms of queries and keys keep what their weight scales too (FLUX, Wan).
    assert 0.99 <= kept / own.activations(4, adapters=None) <= 1.12


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_adapters_are_what_autograd_keeps(name: str, dtype: torch.dtype):
    model, adapters = adapted(name, dtype)
    kept = saved_bytes(CASES[name].call, model, dtype) / ITEMS
    own = network_of(name).activations(dtype.itemsize, adapters=adapters)
    # In bfloat16 some norms keep a float32 copy of their input.
    assert abs(kept / own - 1) <= (0.03 if dtype == torch.float32 else 0.13)


@pytest.mark.parametrize("name", NAMES)
def test_activations_under_autocast(name: str):
    own, case = network_of(name), CASES[name]
    kept = saved_bytes(case.call, case.build(), torch.float32, autocast=torch.bfloat16) / ITEMS
    # A CPU's autocast keeps layer norms in bfloat16 (below) and what weighs queries and keys in float32 (above).
    assert 0.80 <= kept / own.activations(2, adapters=None, autocast=True) <= 1.20


def test_digits():
    model, call = digits_network()
    own = FAMILIES["DigitsVelocity"].network(DIGITS, 64, 11)
    assert own.parameters == sum(p.numel() for p in model.parameters())
    assert counted_flops(call, model) == (ITEMS * own.forward(), ITEMS * own.backward())
    assert saved_bytes(call, model, torch.float32) / ITEMS == pytest.approx(own.activations(4, adapters=None), rel=0.12)


def test_checkpointing_keeps_inputs_and_one_block():
    own = network_of("flux")
    double, single = own.parts[1], own.parts[2]
    inputs = 5 * (240 + TEXT) * 128 * 4
    ends = sum(part.full.bytes(4, False) for part in (own.parts[0], own.parts[3]))
    largest = max(double.full.bytes(4, False), single.full.bytes(4, False))
    assert own.activations(4, adapters=None, checkpointing=True) == inputs + ends + largest


def test_targets_are_those_of_the_backbones():
    from branchgrpo.models.auto import import_backbones
    from branchgrpo.models.backbone import REGISTRY

    assert architectures.ATTENTION == lora.ATTENTION
    import_backbones()
    for backbone in set(REGISTRY.values()):
        assert FAMILIES[backbone.transformer_class].targets == backbone.lora_targets


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-flux", "tiny-sd3", "tiny-qwen-image", "tiny-wan"])
def test_a_folder_is_read_and_agrees_with_its_backbone(name: str):
    from branchgrpo.models.auto import load_backbone
    from branchgrpo.models.tiny.folders import TINY, tiny_pipeline

    frames, height, width = TINY[name].size
    folder = str(tiny_pipeline(name))
    backbone = load_backbone(folder)
    found = architecture(folder)
    latent = found.latent(height, width, frames)
    assert latent[:1] + latent[2 if found.time == 1 else 1 :] == tuple(backbone.latent_shape(height, width, frames))
    own = found.family.network(found.config, found.tokens(latent), 16)
    assert own.parameters == sum(p.numel() for p in backbone.transformer.parameters())


# ---- an iteration ---------------------------------------------------------------------------------------------------


def test_an_iteration_of_branchgrpo_by_hand():
    found = forecast(preset("branchgrpo-widpru"), replace(FLUX, gpus=4, prompts=8))
    forward, backward = found["flops_forward"], found["flops_backward"]
    assert (found["latent_elements"], found["latent_tokens"]) == (16 * 90 * 90, 45 * 45)
    assert (found["calls_rollout"], found["calls_update"]) == (8 * 203, 8 * 115)
    assert found["flops_iteration"] == 8 * (203 * forward + 115 * (forward + backward))
    # Flat GRPO of 16 leaves: one shared call, then 16 a step; the last step has no noise to train.
    assert found["ratio_to_flat"] == pytest.approx(
        (203 * forward + 115 * (forward + backward)) / (305 * forward + 289 * (forward + backward))
    )
    assert found["ddp"]["states"] == 2 * 219 * 129_600 * 4
    assert found["ddp"]["total"] == sum(found["ddp"][key] for key in MEMORY_MEANING if key != "total")


def test_flat_grpo_is_one():
    assert forecast(preset("dancegrpo"), FLUX)["ratio_to_flat"] == 1.0


def test_guidance_by_two_branches_doubles():
    one, two = (
        forecast(preset("branchgrpo"), Setup("sd3.5-medium", height=512, width=512, guidance=kind))
        for kind in ("none", "classifier_free")
    )
    for key in ("flops_forward", "flops_backward", "flops_iteration", "bytes_activations"):
        assert two[key] == 2 * one[key]
    assert two["ratio_to_flat"] == one["ratio_to_flat"]


def test_memory_of_full_training_and_adapters():
    weights = backbone_of(FLUX).network.parameters
    full = forecast(preset("branchgrpo"), FLUX)["ddp"]
    # Float32 weights and their bfloat16 copies, gradients, two averages.
    assert (full["weights"], full["gradients"], full["optimizer"]) == (6 * weights, 4 * weights, 8 * weights)
    averaged = forecast(preset("branchgrpo"), replace(FLUX, ema=True))["ddp"]
    assert averaged["optimizer"] == 12 * weights
    low = forecast(preset("branchgrpo"), replace(FLUX, rank=16))
    assert low["ddp"]["weights"] == 2 * weights + 4 * low["trained_parameters"]
    assert low["ddp"]["optimizer"] == 8 * low["trained_parameters"]


def test_sharding_divides_and_gathers_two_blocks():
    alone, eight = (
        forecast(preset("branchgrpo"), replace(FLUX, dtype="float32", gpus=n, micro_batch=0)) for n in (1, 8)
    )
    assert alone["fsdp2"] == alone["ddp"]
    block = backbone_of(FLUX).network.largest_block
    assert eight["fsdp2"]["weights"] == eight["ddp"]["weights"] // 8 + 2 * 4 * block
    assert eight["fsdp2"]["gradients"] == eight["ddp"]["gradients"] // 8
    parts = forecast(preset("branchgrpo"), replace(FLUX, dtype="float32", gpus=8, micro_batch=4))
    assert parts["fsdp2"]["gradients"] == parts["ddp"]["gradients"]
    assert parts["ddp"]["activations"] == 4 * parts["bytes_activations"]


def test_a_frozen_reference_costs_calls_and_memory():
    found = forecast(preset("flowgrpo"), Setup("sd3.5-medium", height=512, width=512))
    assert found["calls_reference"] == found["calls_update"] > 0
    assert found["flops_reference"] == found["calls_reference"] * found["flops_forward"]
    assert found["ddp"]["weights"] == (4 + 4 + 2) * found["parameters"]
    assert forecast(preset("flowgrpo"), Setup("sd3.5-medium", height=512, width=512, rank=8))["ddp"]["weights"] < (
        2.1 * found["parameters"]
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_forecast(name: str):
    found = forecast(preset(name), FLUX)
    assert list(found) == list(PLANNER_MEANING)
    assert 0 < found["ratio_to_flat"] < 2
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backbone": "flux1-dev"}, OptionError, "'flux.1-dev'?"),
        ({"height": 725}, InputError, "a positive multiple of 16 for flux.1-dev"),
        ({"frames": 5}, InputError, "a model of images"),
        ({"gpus": 4, "prompts": 6}, OptionError, "a multiple of gpus · accumulation = 4"),
        ({"dtype": "float8"}, OptionError, "one of float64, float32"),
        ({"guidance": "strong"}, OptionError, "one of none, embedded"),
        ({"rank": 4, "targets": ("to_x",)}, OptionError, "the end of a linear layer's name"),
        ({"backbone": "wan2.1-1.3b", "frames": 80, "height": 480, "width": 832}, InputError, "1 + n·4"),
        ({"micro_batch": -1}, OptionError, "an integer ≥ 0"),
    ],
)  # fmt: skip
def test_what_is_not_legal_is_refused(options: dict, error: type, message: str):
    with pytest.raises(error) as caught:
        forecast(preset("branchgrpo"), Setup(**{"backbone": "flux.1-dev", **options}))
    assert message in str(caught.value)


def test_a_folder_of_another_transformer_is_refused(tmp_path: Path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "PixArtPipeline", "transformer": ["diffusers", "PixArtTransformer2DModel"]})
    )
    with pytest.raises(InputError, match="PixArtTransformer2DModel"):
        architecture(str(tmp_path))


# ---- the command ----------------------------------------------------------------------------------------------------

WORDS = ("plan", "--backbone", "flux.1-dev", "--height", "720", "--width", "720")


def test_json_adds_one_key(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--preset", "branchgrpo", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*WORDS, "--preset", "branchgrpo", "--gpus", "8", "--lora", "32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    own = found.pop("planner")
    assert found == plain
    assert own == forecast(preset("branchgrpo"), replace(FLUX, gpus=8, rank=32))


def test_tables_say_what_was_counted():
    one = branchgrpo(*WORDS, "--preset", "branchgrpo", "--gradient-checkpointing").stdout
    for word in (*(key for key in PLANNER_MEANING if key not in ("ddp", "fsdp2")), *MEMORY_MEANING, "11.9 G"):
        assert word in one
    every = branchgrpo(*WORDS)
    assert every.returncode == 0
    assert all(name in every.stdout for name in PRESETS)
    assert max(map(len, every.stdout.splitlines())) <= 80


def test_help_states_the_assumptions():
    text = branchgrpo("plan", "--help").stdout
    for phrase in ("two products for one", "AdamW's two averages", "equally efficient", '"planner"'):
        assert phrase in text


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--gpus", "8"), ("--gpus needs --backbone",)),
        (("--backbone", "flux.1-dev", "--lora", "8", "--full"), ("not allowed with",)),
        (("--config", "missing.toml", "--height", "8"), ("--height beside --config",)),
        (("--config", "missing.toml"), ("missing.toml",)),
        (("--backbone", "flux.1-dev", "--height", "721"), ("height", "multiple of 16")),
    ],
)
def test_mistakes_are_one_line(words: tuple, parts: tuple):
    assert_one_line_error(branchgrpo("plan", *words), *parts)


def test_a_runs_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "run.toml"
    file.write_text(
        '[method]\npreset = "branchgrpo"\nsettings = {steps = 10, splits = [0, 3]}\n'
        '[model]\nsource = "digits"\n[data]\nprompts_per_iteration = 10\n[update]\naccumulation = 5\n'
    )
    assert main(["plan", "--config", str(file), "--gpus", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["leaves"]) == (10, 4)
    assert found["planner"]["calls_rollout"] == 10 * found["denoiser_calls"]
    assert found["planner"]["ddp"]["states"] == 5 * found["nodes"] * 64 * 4


# ---- the prediction -------------------------------------------------------------------------------------------------


def seconds(name: str, network: nn.Module, condition: object, latent: tuple[int, ...]) -> float:
    """Processor time of an iteration's rollout and update, rewards of no cost."""
    from branchgrpo.optimized.noise import KeyedNoise
    from branchgrpo.optimized.sampling import Sampling
    from branchgrpo.optimized.update import accumulate_gradients
    from branchgrpo.reference.method import tree_plan
    from branchgrpo.reference.protocols import Prompt
    from branchgrpo.reference.types import Kernel, KernelKind
    from branchgrpo.rewards.analytic import QuadraticReward
    from branchgrpo.training.demo.iteration import collect

    sde = Kernel(KernelKind.SDE, 0.3)
    plan = {
        "flat": tree_plan(8, sde, splits=(0,), branching=8),
        "tree": tree_plan(8, sde, splits=(0, 2, 4), branching=2, spread=4.0),
    }[name]
    method = replace(preset("branchgrpo"), sampler=plan)
    prompts, reward = tuple(Prompt(i, str(i)) for i in range(len(condition))), QuadraticReward(torch.zeros(latent))
    started = time.process_time()
    (batch,) = collect(method, network, prompts, condition, Sampling(KeyedNoise(0), latent_shape=latent), reward)
    trees = [batch.tree], network, condition, [batch.advantages], [batch.kept]
    accumulate_gradients(*trees, method.objective, micro_batch=32)
    return time.process_time() - started


@pytest.mark.slow
def test_the_ratio_to_flat_is_what_is_measured():
    from branchgrpo.models.digits import DigitsConfig, DigitsVelocity
    from branchgrpo.reference.protocols import TensorCondition

    # Wide, so that the products take the time.
    torch.manual_seed(0)
    network = DigitsVelocity(DigitsConfig(width=1024, hidden=2048, blocks=4))
    condition = TensorCondition({"label": torch.arange(8)})
    # In turns, so that whoever else uses the machine slows both; the least of each is the least disturbed.
    turns = [[seconds(name, network, condition, (1, 8, 8)) for name in ("tree", "flat")] for _ in range(6)]
    tree, flat = (min(times) for times in zip(*turns, strict=True))
    measured = tree / flat
    from branchgrpo.reference.method import tree_plan
    from branchgrpo.reference.types import Kernel, KernelKind

    plan = tree_plan(8, Kernel(KernelKind.SDE, 0.3), splits=(0, 2, 4), branching=2, spread=4.0)
    predicted = forecast(replace(preset("branchgrpo"), sampler=plan), Setup("digits"))["ratio_to_flat"]
    print(f"measured {measured:.3f}, predicted {predicted:.3f}")
    # Calls of a tree's first steps have few items, which a CPU does less efficiently.
    assert measured == pytest.approx(predicted, rel=0.25)
