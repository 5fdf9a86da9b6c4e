"""The training engine in one process: updates that do not depend on how they are cut up, and everything around them."""

import fcntl
import json
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_optimized import shapes_unchecked
from helpers_training import (
    bad_reward,
    bad_weights,
    largest_difference,
    moved_from_start,
    numbers,
    records,
    run_small,
    small,
    weights_of,
)
from torch import nn

from branchgrpo.reference.errors import InputError, ModelError, OptionError, RewardError
from branchgrpo.training.checkpoint.errors import CheckpointError
from branchgrpo.training.checkpoint.layout import steps
from branchgrpo.training.checkpoint.read import newest
from branchgrpo.training.config.schema import EmaConfig, OptimizerConfig
from branchgrpo.training.digits import pretrained_generator
from branchgrpo.training.engine.ema import Ema, averaged_weights
from branchgrpo.training.engine.interrupt import Interrupts
from branchgrpo.training.engine.loop import Hooks
from branchgrpo.training.engine.optimizer import build_optimizer, clip_gradients, learning_rate
from branchgrpo.training.engine.run import Run
from branchgrpo.training.monitors.limits import MonitorStop

EXACT = ("model.dtype=float64", "rollout.dtype=float64", "rollout.storage_dtype=float64", "rollout.decode_chunk=1")
"""All arithmetic in float64, and leaves that the classifier (float32) reads one by one, whoever is rolled out beside
them."""
ROUNDING = 1e-9
"""Of the weights, for two runs in float64 that add the same numbers in another order.  A gradient is then off by about
1e-16 of its largest entry, and AdamW turns an error δ of a gradient g into at most rate · δ / (|g| + eps), below
3e-4 · 1e-16 / 1e-8 a step; what differs by more than 1e-9 was computed from other numbers."""

METHODS: dict[str, tuple[str, ...]] = {
    "branchgrpo": (),
    "branchgrpo-extreme": ("method.preset=branchgrpo-extreme",),
    "depth windows": ("method.settings.pruning=[{rule='depth_window', start=4, size=2, period=1}]",),
    "flowgrpo": ("method.preset=flowgrpo", "method.settings={steps=4, group=4}"),
    "mixgrpo": ("method.preset=mixgrpo", "method.settings={steps=6, group=4, window=2, period=1}"),
    "random steps": (
        "method.preset=dancegrpo",
        "method.settings={steps=5, group=3, trained_fraction=0.3}",
        "method.objective.edge_weights=std",
    ),
    "g2rpo": ("method.preset=g2rpo", "method.settings={steps=6, group=3, granularities=[1, 2]}"),
    "tempflow": (
        "method.preset=tempflow",
        "method.settings={steps=4, roots=2, group=3}",
        "update.step_per=iteration",
    ),
    "kl": ("method.objective.kl=0.1",),
}
MOVING = ("depth windows", "mixgrpo", "kl")
"""Methods whose second iteration is another matter than the first."""


QUICK = ("branchgrpo", "g2rpo", "random steps")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in METHODS])
@shapes_unchecked()
def test_accumulation_and_micro_batches_change_no_update(name: str, tmp_path: Path) -> None:
    options = (*METHODS[name], *EXACT, f"run.iterations={2 if name in MOVING else 1}")
    run_small(tmp_path / "whole", *options)
    run_small(tmp_path / "cut", *options, "update.accumulation=4", "update.micro_batch=3")
    assert moved_from_start(tmp_path / "whole") > 1e-4
    assert largest_difference(weights_of(tmp_path / "whole"), weights_of(tmp_path / "cut")) < ROUNDING
    for one, two in zip(records(tmp_path / "whole"), records(tmp_path / "cut"), strict=True):
        for key in ("objective", "gradient_norm", "ratio/min", "kl", "edges_trained", "reward/digits/mean"):
            assert two["metrics"][key] == pytest.approx(one["metrics"][key], rel=1e-9, abs=1e-11)


@pytest.mark.slow
@shapes_unchecked()
def test_micro_batches_of_1_and_16_give_the_same_update_in_float32(tmp_path: Path) -> None:
    """float32 gradients differ by about 1e-7 of their size; AdamW's first steps move a weight by the rate whatever its
    gradient, so the few weights whose gradient is rounding itself may differ by twice the rate, the mean may not."""
    for size in (1, 16):
        run_small(tmp_path / str(size), f"update.micro_batch={size}", "run.iterations=2")
    one, two = weights_of(tmp_path / "1"), weights_of(tmp_path / "16")
    mean = sum(float((one[n] - two[n]).abs().sum()) for n in one) / sum(t.numel() for t in one.values())
    assert mean < 1e-3 * moved_from_start(tmp_path / "1")
    assert largest_difference(one, two) <= 2 * 2 * 3e-4


@shapes_unchecked()
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    """EMA, accumulation, a window that moves and one that prunes, evaluations and scores."""
    options = (
        "run.iterations=4", "update.accumulation=2", "update.inner_epochs=2", "ema.decay=0.9", "checkpoint.every=2",
        "evaluation.every=2", "evaluation.samples=2", "evaluation.grid=2", "logging.scores=true",
        "optimizer.schedule=cosine", "optimizer.warmup_steps=2",
        "method.preset=mixgrpo", "method.settings={steps=6, group=4, window=2, period=1}",
    )  # fmt: skip

    class StopHereError(Exception):
        pass

    def stop(iteration: int, metrics: object) -> None:
        if iteration == 2:
            raise StopHereError

    options = tuple(option for option in options if not option.startswith("method.settings.splits"))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_small(whole, *options)
    with pytest.raises(StopHereError):
        run_small(cut, *options, hooks=Hooks(on_iteration=stop))
    assert [path.name for path in steps(cut)] == ["step-000002"]
    run_small(cut, *options, resume=True)
    assert largest_difference(weights_of(whole), weights_of(cut)) == 0.0
    assert numbers(whole) == numbers(cut)
    assert (whole / "scores.jsonl").read_bytes() == (cut / "scores.jsonl").read_bytes()
    for name in ("ema", "optimizer"):
        files = [newest(folder) / f"{name}.safetensors" for folder in (whole, cut)]  # type: ignore[operator]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_learning_rates_are_a_function_of_the_step() -> None:
    flat = OptimizerConfig(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(flat, step, 10) for step in (0, 1, 3, 4, 9)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    line = replace(flat, schedule="linear", final_fraction=0.5)
    assert [learning_rate(line, step, 12) for step in (4, 8, 12)] == [1.0, 0.75, 0.5]
    wave = replace(flat, schedule="cosine", warmup_steps=0)
    assert [learning_rate(wave, step, 10) for step in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])


def test_the_schedule_reaches_the_optimizer(tmp_path: Path) -> None:
    run_small(tmp_path, "update.inner_epochs=2", "optimizer.schedule=linear", "optimizer.learning_rate=6e-4")
    found = [record["metrics"]["learning_rate"] for record in records(tmp_path)]
    assert found == pytest.approx([5e-4, 3e-4, 1e-4])


def test_weight_decay_pulls_matrices_only() -> None:
    network = nn.Linear(3, 2)
    optimizer = build_optimizer(OptimizerConfig(learning_rate=0.1, weight_decay=0.5), dict(network.named_parameters()))
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    optimizer.step()
    assert torch.equal(network.bias, before["bias"])
    torch.testing.assert_close(network.weight.detach(), before["weight"] * 0.95)


def test_an_eight_bit_optimizer_needs_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(OptionError, match=r"optimizer\.kind = 'adamw_8bit': must be .*pip install bitsandbytes"):
        run_small(tmp_path, "optimizer.kind=adamw_8bit")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_gradients_are_clipped_to_the_norm_on_every_step(tmp_path: Path) -> None:
    network = nn.Linear(3, 2)
    weights = dict(network.named_parameters())
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    assert clip_gradients(weights, 1.0) == pytest.approx(2.0 * 8**0.5)
    assert clip_gradients(weights, float("inf")) == pytest.approx(1.0, rel=1e-5)
    network.weight.grad[0, 0] = float("nan")  # type: ignore[index]
    with pytest.raises(ModelError, match="gradient norm"):
        clip_gradients(weights, 1.0)
    seen: list[float] = []

    def watch(run: Run) -> None:
        inner = run.updater.optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            gradients = [p.grad for p in run.policies.weights.values() if p.grad is not None]
            seen.append(float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt()))
            return inner(*args, **kwargs)

        run.updater.optimizer.step = step  # type: ignore[method-assign]

    family = ("method.preset=g2rpo", "method.settings={steps=6, group=3, granularities=[1]}", "run.iterations=1")
    options = (*family, "method.objective.clip_low=0.9", "method.objective.clip_high=9.0", "update.inner_epochs=2")
    run_small(tmp_path, *options, "update.max_grad_norm=1e-3", hooks=Hooks(on_start=watch))
    assert len(seen) == 2 * 3
    assert seen == pytest.approx([1e-3] * len(seen), rel=1e-3)


def test_the_average_follows_its_formula_and_leaves_the_weights_alone() -> None:
    network = nn.Linear(2, 1).to(torch.bfloat16)
    weights = dict(network.named_parameters())
    ema = Ema(weights, EmaConfig(decay=0.75, every=2))
    expected = {name: p.detach().float().clone() for name, p in weights.items()}
    for step in range(4):
        with torch.no_grad():
            for parameter in weights.values():
                parameter.add_(1.0)
        ema.update(weights, step)
        if step % 2 == 1:
            expected = {name: 0.75 * mean + 0.25 * weights[name].detach().float() for name, mean in expected.items()}
    for name, mean in ema.mean.items():
        assert mean.dtype == torch.float32
        torch.testing.assert_close(mean, expected[name])
    before = {name: p.detach().clone() for name, p in weights.items()}
    with averaged_weights(weights, ema):
        torch.testing.assert_close(network.weight.detach(), ema.mean["weight"].to(torch.bfloat16))
    assert all(torch.equal(p, before[name]) for name, p in weights.items())


@pytest.mark.slow
@shapes_unchecked()
def test_the_average_is_what_is_evaluated_and_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    evaluated = ("evaluation.every=3", "evaluation.samples=2", "evaluation.grid=0")
    run_small(tmp_path / "with", *evaluated, "ema.decay=0.999")
    run_small(tmp_path / "without", *evaluated)
    first, last = records(tmp_path / "with", "evaluation")
    assert last["weights"] == "ema"
    key = "evaluation/digits/mean"
    moved = abs(records(tmp_path / "without", "evaluation")[1]["metrics"][key] - first["metrics"][key])
    assert abs(last["metrics"][key] - first["metrics"][key]) < 0.1 * moved
    assert largest_difference(weights_of(tmp_path / "with"), weights_of(tmp_path / "without")) == 0.0
    exported = load_file(tmp_path / "with" / "export" / "digits.safetensors")
    assert largest_difference(exported, pretrained_generator().state_dict()) < 0.01 * moved_from_start(
        tmp_path / "with"
    )


@shapes_unchecked()
def test_inner_epochs_repeat_the_update_with_the_old_log_probabilities(tmp_path: Path) -> None:
    run_small(tmp_path, "update.inner_epochs=3", "run.iterations=1")
    (record,) = records(tmp_path)
    assert record["metrics"]["log_prob_drift"] < 1e-5
    assert record["metrics"]["ratio/max"] - 1.0 > 1e-4
    one = tmp_path / "one"
    run_small(one, "run.iterations=1")
    assert record["metrics"]["edges_trained"] == 3 * records(one)[0]["metrics"]["edges_trained"]


@shapes_unchecked()
def test_the_reference_stays_where_the_policy_began(tmp_path: Path) -> None:
    run_small(tmp_path, "method.objective.kl=1.0")
    found = [record["metrics"]["kl"] for record in records(tmp_path)]
    assert found[0] == 0.0
    assert 0.0 < found[1] < found[2]


def test_a_family_steps_once_a_member_or_once_an_iteration(tmp_path: Path) -> None:
    family = ("method.preset=g2rpo", "method.settings={steps=6, group=3, granularities=[1, 2]}", "run.iterations=1")
    taken = {}
    for step_per in ("member", "iteration"):
        run_small(tmp_path / step_per, *family, f"update.step_per={step_per}")
        checkpoint = newest(tmp_path / step_per)
        assert checkpoint is not None
        taken[step_per] = json.loads((checkpoint / "state.json").read_text())["optimizer_steps"]
    assert taken == {"member": 3, "iteration": 1}


def test_step_weights_need_a_step_of_the_optimizer_over_several_steps(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"update\.step_per = 'member': must be 'iteration'"):
        run_small(tmp_path, "method.preset=tempflow", "method.settings={steps=4}", "update.step_per=member")


def test_half_precision_without_loss_scaling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"model\.dtype = 'float16'"):
        run_small(tmp_path, "model.dtype=float16")


@pytest.mark.slow
@shapes_unchecked()
def test_bfloat16_keeps_master_weights_and_the_ratio_at_one(tmp_path: Path) -> None:
    run_small(tmp_path, "model.dtype=bfloat16")
    assert all(tensor.dtype == torch.float32 for tensor in weights_of(tmp_path).values())
    assert all(record["metrics"]["log_prob_drift"] < 1e-5 for record in records(tmp_path))
    run_small(tmp_path / "full")
    assert largest_difference(weights_of(tmp_path), weights_of(tmp_path / "full")) > 0.0


def test_a_monitor_saves_and_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(MonitorStop, match="gradient_norm at iteration 0"):
        run_small(tmp_path, "monitors.gradient_norm={warn=1e-10, stop=1e-9}")
    assert [path.name for path in steps(tmp_path)] == ["step-000001"]
    assert records(tmp_path, "end")[0]["reason"] == "stopped"


def test_a_bad_reward_ends_the_run_with_all_scores_written_down(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="model digits, leaf 0, prompt"):
        run_small(tmp_path, "logging.scores=true", hooks=Hooks(on_start=bad_reward))
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 4 * 4
    assert [line["value"] for line in lines].count(None) == 1
    assert records(tmp_path, "end")[0]["reason"] == "failed"


def test_bad_weights_end_the_run_before_anything_is_learnt_from_them(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="velocity at step 0"):
        run_small(tmp_path, hooks=Hooks(on_start=bad_weights))
    assert steps(tmp_path) == []


def test_a_folder_with_a_run_is_not_mixed_with_another(tmp_path: Path) -> None:
    run_small(tmp_path, "run.iterations=1")
    with pytest.raises(InputError, match=r"run\.folder = .*: must be a folder without a run"):
        run_small(tmp_path, "run.iterations=1")
    with pytest.raises(CheckpointError, match=r"optimizer\.learning_rate = 0\.0003, now 0\.001"):
        run_small(tmp_path, "run.iterations=1", "optimizer.learning_rate=1e-3", resume=True)
    longer = run_small(tmp_path, "run.iterations=2", resume=True)
    assert longer.iterations == 2
    run_small(tmp_path / "other", "run.iterations=2")
    assert largest_difference(weights_of(tmp_path), weights_of(tmp_path / "other")) == 0.0


def test_a_folder_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    with (tmp_path / "run.lock").open("w") as other:
        other.write("4242")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="must be free: process 4242 is training there"):
            run_small(tmp_path)
    run_small(tmp_path, "run.iterations=1")


def test_prompts_that_parts_do_not_divide_are_refused_before_the_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"update\.accumulation|prompts_per_iteration"):
        run_small(tmp_path / "run", "update.accumulation=3")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("eta", "dtype"), [("1e300", "float32"), ("1e-300", "float32"), ("1e4", "float16")])
def test_steps_that_leave_the_dtype_are_refused_at_the_start(eta: str, dtype: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=rf"of step \d = .*: must be within what rollout\.dtype = '{dtype}' holds"):
        run_small(tmp_path / "run", f"method.settings.eta={eta}", f"rollout.dtype={dtype}")
    assert not (tmp_path / "run").exists()


def test_a_run_cannot_end_before_its_checkpoint(tmp_path: Path) -> None:
    run_small(tmp_path, "run.iterations=2")
    kept = (tmp_path / "config.toml").read_text()
    with pytest.raises(OptionError, match=r"run\.iterations = 1: must be at least 2"):
        run_small(tmp_path, "run.iterations=1", resume=True)
    assert (tmp_path / "config.toml").read_text() == kept
    assert run_small(tmp_path, "run.iterations=2", resume=True).iterations == 2


def test_a_plan_that_will_run_dry_is_refused_at_the_start(tmp_path: Path) -> None:
    """The window reaches the last trainable depth only at iteration 3: the run would have ended there."""
    rule = "method.settings.pruning=[{rule='depth_window', start=1, size=5, period=3}]"
    with pytest.raises(ValueError, match="must be"):
        run_small(tmp_path / "run", rule)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def listening() -> Iterator[None]:
    """The signals' usual handlers, whatever the shell that started the tests has chosen."""
    kept = [signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)]
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), kept, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("listening")
def test_one_signal_is_noted_and_the_second_acts() -> None:
    with Interrupts() as interrupts:
        assert interrupts.requested is None
        signal.raise_signal(signal.SIGINT)
        assert interrupts.requested == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("listening")
def test_a_signal_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.requested is None


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("moment", ["sampling", "between"])
def test_an_interrupted_run_is_saved_and_goes_on(moment: str, tmp_path: Path) -> None:
    """While an iteration is sampled it is left, and sampled again; otherwise it is finished."""

    def between(iteration: int, metrics: object) -> None:
        if iteration == 0:
            signal.raise_signal(signal.SIGTERM)

    def sampling(run: Run) -> None:
        calls = iter(range(1000))
        inner = run.task.condition

        def condition(prompts: Any) -> Any:
            if next(calls) == 2:  # the first part of the second iteration
                signal.raise_signal(signal.SIGTERM)
            return inner(prompts)

        run.task = replace(run.task, condition=condition)

    hooks = Hooks(on_iteration=between) if moment == "between" else Hooks(on_start=sampling)
    options = ("update.accumulation=2", "logging.scores=true")
    result = run_small(tmp_path / "cut", *options, hooks=hooks)
    assert (result.status, result.iterations) == ("interrupted", 1)
    assert [path.name for path in steps(tmp_path / "cut")] == ["step-000001"]
    assert records(tmp_path / "cut", "end")[0]["text"] == "SIGTERM"
    assert run_small(tmp_path / "cut", *options, resume=True).status == "finished"
    run_small(tmp_path / "whole", *options)
    assert largest_difference(weights_of(tmp_path / "cut"), weights_of(tmp_path / "whole")) == 0.0
    assert (tmp_path / "cut" / "scores.jsonl").read_bytes() == (tmp_path / "whole" / "scores.jsonl").read_bytes()


@pytest.mark.usefixtures("listening")
def test_a_second_signal_ends_the_run_at_once_and_is_no_failure(tmp_path: Path) -> None:
    def twice(iteration: int, metrics: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_small(tmp_path, hooks=Hooks(on_iteration=twice))
    assert records(tmp_path, "end")[0]["reason"] == "interrupted"


@pytest.mark.slow
@shapes_unchecked()
def test_costly_monitors_change_no_number(tmp_path: Path) -> None:
    run_small(tmp_path / "with", "monitors.costly_every=2")
    run_small(tmp_path / "without")
    assert largest_difference(weights_of(tmp_path / "with"), weights_of(tmp_path / "without")) == 0.0
    found = [any(key.startswith("gradient_norm/") for key in r["metrics"]) for r in records(tmp_path / "with")]
    assert found == [True, False, True]


def test_the_resolved_configuration_is_kept(tmp_path: Path) -> None:
    from branchgrpo.training.config.reading import read_config

    run_small(tmp_path, "run.iterations=1")
    assert read_config(tmp_path / "config.toml") == small(tmp_path, "run.iterations=1")


@shapes_unchecked()
def test_the_rooms_page_shows_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[1] / "optimized/branchgrpo/training/README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert (tmp_path / "runs" / "example" / "metrics.jsonl").is_file()
