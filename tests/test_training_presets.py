"""Presets: the published settings, and a twin of each at the size of a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.presets import PRESETS, preset
from branchgrpo.training.config.method import build_method
from branchgrpo.training.config.names import methods, preset_document, preset_names, twins
from branchgrpo.training.config.reading import load_preset, read_config
from branchgrpo.training.config.schema import LoraConfig, TrainConfig
from branchgrpo.training.data.prompts import read_prompts

SD3 = ("flowgrpo", "tempflow")
ALL = """
from branchgrpo.reference.presets import preset
from branchgrpo.training.config.method import build_method
from branchgrpo.training.config.names import preset_names
from branchgrpo.training.config.reading import load_preset
published, twins = 0, 0
for name in preset_names():
    config = load_preset(name)
    method, _, twin = name.partition("@")
    assert config.method.preset == method, name
    if twin:
        assert config.model.source == twin, name
        twins += 1
    else:
        assert build_method(config.method) == preset(name), name
        published += 1
print(published, twins)
"""


def test_every_method_has_a_published_run_and_every_twin() -> None:
    assert set(methods()) == set(PRESETS)
    assert twins() == ("digits", "tiny-flux", "tiny-qwen-image", "tiny-sd3", "tiny-wan")
    assert len(preset_names()) == len(PRESETS) * 6


def test_published_runs_train_the_published_methods_and_twins_load() -> None:
    """In a process of its own, where no types are checked: 162 configurations in a second."""
    done = subprocess.run([sys.executable, "-c", ALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(PRESETS)), str(5 * len(PRESETS))]


@pytest.mark.parametrize("twin", ["digits", "tiny-wan"])
@pytest.mark.parametrize("name", ["branchgrpo-k4", "branchgrpo-deppru", "flowgrpo", "mixgrpo", "tempflow"])
def test_a_twin_is_the_same_method_on_a_small_model(name: str, twin: str) -> None:
    config = load_preset(f"{name}@{twin}")
    assert config.model.source == twin
    assert config.run.device == "cpu"
    assert config.run.iterations <= 8
    published, small = preset(name), build_method(config.method)
    for option in ("fusion", "normalization", "pruning", "objective", "log_prob"):
        assert getattr(small, option) == getattr(published, option)
    assert type(small.sampler) is type(published.sampler)


@pytest.mark.parametrize("name", ["branchgrpo", "branchgrpo-k4", "dancegrpo-tf06", "g2rpo", "g2rpo-10", "mixgrpo-10"])
def test_flux_runs_have_the_published_settings(name: str) -> None:
    config = load_preset(name)
    model, optimizer = config.model, config.optimizer
    assert model.source == "black-forest-labs/FLUX.1-dev"
    assert (model.height, model.width, model.guidance, model.guidance_scale) == (720, 720, "embedded", 3.5)
    assert (model.dtype, model.lora, optimizer.weight_decay, config.update.max_grad_norm) == ("bfloat16", None, 1e-4, 1)
    trained = [reward.name for reward in config.rewards if not reward.held_out]
    if name.startswith("g2rpo"):
        assert (config.run.iterations, optimizer.learning_rate, config.update.step_per) == (301, 2e-6, "member")
        assert trained == ["hps_v2.1", "clip"]
    else:
        assert (config.run.iterations, optimizer.learning_rate, config.update.accumulation) == (300, 1e-5, 12)
        assert trained == ["hps_v2.1"]
    assert [reward.name for reward in config.rewards if reward.held_out] == ["pickscore", "image_reward"]
    assert config.ema.decay == (0.995 if name.startswith("branchgrpo") else 0.0)


@pytest.mark.parametrize("name", SD3)
def test_stable_diffusion_runs_have_the_published_settings(name: str) -> None:
    config = load_preset(name)
    assert config.model.source == "stabilityai/stable-diffusion-3.5-medium"
    assert (config.model.height, config.model.width, config.model.lora) == (512, 512, LoraConfig(32, 64))
    assert (config.optimizer.learning_rate, config.evaluation.steps) == (3e-4, 40)


def test_unknown_presets_are_refused_with_the_nearest() -> None:
    for name, near in {"brnchgrpo": "branchgrpo", "g2rpo@digit": "g2rpo@digits", "branchgrpo@": "branchgrpo"}.items():
        with pytest.raises(OptionError, match=f"'{near}"):
            load_preset(name)
    with pytest.raises(OptionError, match="alone or with @digits"):
        load_preset("nothing like it")


def test_reading_a_preset_does_not_change_it() -> None:
    first = preset_document("g2rpo@digits")
    first["run"]["iterations"] = 999
    assert load_preset("g2rpo@digits").run.iterations < 999


def test_the_defaults_are_a_run_on_digits() -> None:
    assert TrainConfig().model.source == "digits"


@pytest.mark.parametrize("folder", ["methods", "bases", "twins"])
def test_preset_files_explain_themselves(folder: str) -> None:
    from branchgrpo.training.config.names import FOLDER

    files = sorted((FOLDER / folder).glob("*.toml"))
    assert files
    for file in files:
        assert file.read_text(encoding="utf-8").startswith("# "), file
        assert all(len(line) <= 120 for line in file.read_text(encoding="utf-8").splitlines()), file


def test_published_runs_ask_for_prompts_by_name(tmp_path: Path) -> None:
    prompts = tmp_path / "mine.txt"
    prompts.write_text("a\nb\n", encoding="utf-8")
    config = read_config(preset="branchgrpo", overrides=[f"data.prompts={prompts}"])
    assert len(read_prompts(config.data.prompts)) == 2
