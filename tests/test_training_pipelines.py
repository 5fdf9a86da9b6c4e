"""Training on a tiny FLUX: adapters and all weights, precision, prompts through the cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_optimized import shapes_unchecked
from helpers_training import largest_difference, records, run_small, weights_of

from branchgrpo.reference.errors import OptionError
from branchgrpo.training.engine.loop import Hooks
from branchgrpo.training.engine.run import Run

pytestmark = pytest.mark.slow

TINY = (
    "model.source=tiny-flux",
    'rewards=[{name="colour"}]',
    "data.prompts_per_iteration=2",
    "data.held_out_prompts=2",
    "method.settings={steps=4, splits=[0, 1]}",
    "run.iterations=2",
    "checkpoint.export=false",
)
LORA = "model.lora={rank=4, alpha=4}"


class Before:
    """What a run starts with, by name, and the encoders taken away once the prompts are encoded."""

    def __init__(self) -> None:
        self.state: dict[str, torch.Tensor] = {}
        self.after: dict[str, torch.Tensor] = {}
        self.network: Any = None

    def __call__(self, run: Run) -> None:
        self.network = run.task.network
        self.state = {name: p.detach().clone() for name, p in self.network.named_parameters()}

        def gone() -> Any:
            raise AssertionError("an encoder is loaded after the run's prompts were encoded")

        self.network.text_pipeline = gone


@shapes_unchecked()
def test_an_adapter_is_trained_in_float32_beside_frozen_bfloat16_weights(tmp_path: Path) -> None:
    before = Before()
    options = (*TINY, LORA, "model.dtype=bfloat16", "method.objective.kl=1.0", "evaluation.every=2")
    run_small(tmp_path, *options, hooks=Hooks(on_start=before))
    saved = weights_of(tmp_path)
    assert saved
    assert all("lora_" in name and tensor.dtype == torch.float32 for name, tensor in saved.items())
    assert largest_difference(saved, {name: before.state[name] for name in saved}) > 1e-5
    for name, parameter in before.network.named_parameters():
        if name not in saved:
            assert torch.equal(parameter, before.state[name]), name
    assert before.network.transformer.x_embedder.weight.dtype == torch.bfloat16
    found = [record["metrics"]["kl"] for record in records(tmp_path)]
    assert found[0] == 0.0
    assert found[1] > 0.0
    assert all(record["metrics"]["log_prob_drift"] < 1e-5 for record in records(tmp_path))


@shapes_unchecked()
def test_all_weights_are_trained_in_float32_with_bfloat16_arithmetic(tmp_path: Path) -> None:
    run_small(tmp_path / "low", *TINY, "model.dtype=bfloat16", "method.objective.kl=1.0")
    run_small(tmp_path / "full", *TINY)
    low, full = weights_of(tmp_path / "low"), weights_of(tmp_path / "full")
    assert all(tensor.dtype == torch.float32 for tensor in low.values())
    assert largest_difference(low, full) > 0.0
    rewards = [records(tmp_path / name)[0]["metrics"]["reward/colour/mean"] for name in ("low", "full")]
    assert rewards[0] == pytest.approx(rewards[1], abs=0.01)
    assert records(tmp_path / "low")[0]["metrics"]["kl"] == 0.0


@shapes_unchecked()
def test_recomputed_activations_give_the_same_update(tmp_path: Path) -> None:
    run_small(tmp_path / "kept", *TINY, LORA)
    run_small(tmp_path / "again", *TINY, LORA, "model.gradient_checkpointing=true")
    assert largest_difference(weights_of(tmp_path / "kept"), weights_of(tmp_path / "again")) < 1e-6


@shapes_unchecked()
def test_the_adapters_first_weights_follow_the_seed_and_nothing_else(tmp_path: Path) -> None:
    states = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)
        before = Before()
        expected = torch.rand(1)
        torch.manual_seed(noise)
        options = (*TINY, LORA, "run.iterations=1", f"run.seed={seed}")
        run_small(tmp_path / f"{seed}-{noise}", *options, hooks=Hooks(on_start=before))
        assert torch.equal(torch.rand(1), expected), "the global generator was used"
        states.append({name: tensor for name, tensor in before.state.items() if "lora_A" in name})
    assert largest_difference(states[0], states[1]) == 0.0
    assert largest_difference(states[0], states[2]) > 0.0


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("model.options={vae_tyling=true}", r"model\.options\.vae_tyling"),
        ("model.options={cache='elsewhere'}", r"model\.options\.cache"),
        ("model.options={vae_dtype='int8'}", r"model\.options\.vae_dtype"),
        ("model.lora={rank=4, alpha=4, targets=['to_nothing']}", r"targets"),
        ("model.dtype=float16", r"model\.dtype = 'float16'"),
    ],
)
def test_what_a_pipeline_cannot_follow_is_refused(option: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        run_small(tmp_path, *TINY, option)
    assert not (tmp_path / "metrics.jsonl").exists()
