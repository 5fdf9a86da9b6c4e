"""Several processes, started by torchrun: the update of one process, and one end with one message for all."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_optimized import shapes_unchecked
from helpers_training import (
    SMALL,
    largest_difference,
    moved_from_start,
    numbers,
    records,
    run_small,
    torchrun,
    torchrun_call,
    weights_of,
)
from safetensors.torch import load_file

from branchgrpo.training.checkpoint.read import newest

pytestmark = pytest.mark.slow

RICH = (
    "method.objective.kl=0.1",
    "method.fusion.beta=0.5",
    "update.inner_epochs=2",
    "ema.decay=0.9",
    "evaluation.every=3",
    "evaluation.samples=2",
    "data.held_out_prompts=3",
    "monitors.costly_every=1",
    "logging.scores=true",
)
"""Everything that processes do together; the three prompts of an evaluation are not divided by two."""
ROUNDING = 1e-6
"""Of float32 weights below 5, of losses and of rewards: sums over prompts are taken in another order."""


@shapes_unchecked()
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_are_one_with_two_parts(parallel: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_small(one, *RICH, "update.accumulation=2")
    found = torchrun(two, *RICH, f"run.parallel={parallel}")
    assert found.returncode == 0, found.stderr
    assert moved_from_start(one) > 100 * ROUNDING
    assert largest_difference(weights_of(one), weights_of(two)) < ROUNDING
    averages = [load_file(newest(folder) / "ema.safetensors") for folder in (one, two)]  # type: ignore[operator]
    assert largest_difference(*averages) < ROUNDING
    for (kind, step, alone), (kind_2, step_2, together) in zip(numbers(one), numbers(two), strict=True):
        assert (kind, step) == (kind_2, step_2)
        assert alone.keys() == together.keys()
        for name, value in alone.items():
            assert together[name] == pytest.approx(value, rel=1e-4, abs=ROUNDING), name
    scores = [sorted((folder / "scores.jsonl").read_text().splitlines()) for folder in (one, two)]
    assert len(scores[0]) == len(scores[1]) == 3 * 4 * 4


TINY_FLUX = (
    "model.source=tiny-flux",
    'rewards=[{name="colour"}]',
    "data.prompts_per_iteration=2",
    "method.objective.kl=0.1",
    "method.settings={steps=4, splits=[0, 1]}",
    "run.iterations=2",
)


@shapes_unchecked()
@pytest.mark.parametrize(
    ("parallel", "weights"), [("ddp", "model.lora={rank=4, alpha=4}"), ("fsdp2", "model.gradient_checkpointing=true")]
)
def test_a_transformer_over_two_processes_is_the_one_of_one_process(
    parallel: str, weights: str, tmp_path: Path
) -> None:
    """Its weights are of order 1 and its losses small, so an update is compared with the distance it went."""
    one, two = tmp_path / "one", tmp_path / "two"
    run_small(one, *TINY_FLUX, weights, "update.accumulation=2")
    found = torchrun(two, *TINY_FLUX, weights, f"run.parallel={parallel}")
    assert found.returncode == 0, found.stderr
    first, second = weights_of(one), weights_of(two)
    mean = sum(float((first[n] - second[n]).abs().sum()) for n in first) / sum(t.numel() for t in first.values())
    assert mean < 0.01 * 2 * 3e-4
    for alone, together in zip(records(one), records(two), strict=True):
        for name in ("reward/colour/mean", "objective", "kl", "gradient_norm"):
            assert together["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-3, abs=ROUNDING), name


MESSAGES = {
    "reward": "RewardError: rewards = model digits, leaf 0, prompt",
    "weights": "ModelError: velocity at step 0",
    "code": "RuntimeError: a wire came loose",
    "death": "LostProcess: another process",
}


@pytest.mark.parametrize(
    ("parallel", "fault"),
    [*(("ddp", fault) for fault in MESSAGES), ("fsdp2", "reward"), ("fsdp2", "weights")],
)  # fmt: skip
def test_a_fault_of_one_process_ends_all_with_one_message(parallel: str, fault: str, tmp_path: Path) -> None:
    """NaN from the reward, NaN in the weights, an unforeseen error, sudden death, each on the second process only.

    Counted from the moment when the run's log begins, for what comes before is the start of Python and torch.
    """
    run = subprocess.Popen(**torchrun_call(tmp_path, f"run.parallel={parallel}", fault=fault))
    begun = None
    while run.poll() is None:
        if begun is None and (tmp_path / "metrics.jsonl").exists():
            begun = time.monotonic()
        time.sleep(0.05)
    ended = time.monotonic()
    _, errors = run.communicate()
    assert run.returncode != 0
    assert begun is not None, errors
    assert ended - begun < 30.0
    said = [line for line in errors.splitlines() if line.startswith("MESSAGE")]
    assert len(said) == 1, errors
    assert said[0].startswith(f"MESSAGE {MESSAGES[fault]}")


def test_a_wrong_option_is_told_once(tmp_path: Path) -> None:
    found = torchrun(tmp_path / "run", "data.prompts_per_iteration=5")
    said = [line for line in found.stderr.splitlines() if line.startswith("MESSAGE")]
    assert found.returncode != 0
    assert len(said) == 1, found.stderr
    assert "data.prompts_per_iteration = 5: must be a multiple of 2 processes" in said[0]
    assert not (tmp_path / "run").exists()


def hear() -> None:
    """Let Ctrl-C reach the process even where the shell that started the tests ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_saves_and_the_run_goes_on_to_the_same_end(tmp_path: Path) -> None:
    """A real SIGINT to the command; it prints where it stopped, exits with 130, and a resume equals a whole run."""
    options = [*SMALL[1:], "run.iterations=40", "ema.decay=0.9", "logging.scores=true"]
    command = [sys.executable, "-m", "branchgrpo.cli.main", "train", "--preset", "branchgrpo@digits", *options]
    command.append(f"run.folder={tmp_path / 'cut'}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAXTYPING_DISABLE": "1"}
    run = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear
    )
    log = tmp_path / "cut" / "metrics.jsonl"
    while run.poll() is None and (not log.exists() or log.read_text().count('"kind": "iteration"') < 2):
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    output, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors
    assert "interrupted after" in output
    assert "Traceback" not in errors
    done = records(tmp_path / "cut", "end")[0]["iteration"]
    assert 2 <= done < 40
    again = subprocess.run([*command, "--resume"], env=environment, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    whole = subprocess.run(
        [*command[:-1], f"run.folder={tmp_path / 'whole'}"], env=environment, capture_output=True, timeout=300
    )
    assert whole.returncode == 0
    assert largest_difference(weights_of(tmp_path / "cut"), weights_of(tmp_path / "whole")) == 0.0
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert (tmp_path / "cut" / "scores.jsonl").read_bytes() == (tmp_path / "whole" / "scores.jsonl").read_bytes()


WATCH = """
import json, os, sys
written = set()

def note(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)):
        mode, flags = args[1], args[2]
        writes = any(c in mode for c in "wax+") if isinstance(mode, str) else flags & (os.O_WRONLY | os.O_RDWR)
        if writes:
            written.add(os.path.abspath(os.fsdecode(args[0])))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.link", "os.truncate"):
        written.update(os.path.abspath(os.fsdecode(a)) for a in args if isinstance(a, (str, bytes)))

sys.addaudithook(note)
from branchgrpo.cli.main import main
code = main(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    json.dump(sorted(written), file)
sys.exit(code)
"""


def test_nothing_is_written_outside_the_run_folder_and_the_named_caches(tmp_path: Path) -> None:
    """Every file that Python opens to write is noted, and folders that native code might choose stay without files."""
    home, work, temporary, cache = (tmp_path / name for name in ("home", "work", "tmp", "cache"))
    for folder in (home, work, temporary):
        folder.mkdir()
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "JAXTYPING_DISABLE": "1", "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(temporary / "inductor"),
        "HOME": str(home), "TMPDIR": str(temporary), "BRANCHGRPO_CACHE": str(cache), "HF_HOME": str(home / "hf"),
    }  # fmt: skip
    options = [
        "model.source=tiny-flux", 'rewards=[{name="colour"}]', "data.prompts_per_iteration=2", "run.iterations=1",
        "evaluation.every=1", "evaluation.samples=1", "evaluation.grid=2", "data.held_out_prompts=2",
        "logging.scores=true", "logging.tensorboard=true", f"run.folder={tmp_path / 'run'}",
    ]  # fmt: skip
    base = [option for option in SMALL if not option.startswith(("run.iterations", "evaluation", "data"))]
    command = [sys.executable, "-c", WATCH, str(tmp_path / "written.json"), "train", "--preset", "branchgrpo@digits"]
    found = subprocess.run(
        [*command, *base, *options], env=environment, cwd=work, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    allowed = (str(tmp_path / "run"), str(cache), str(tmp_path / "written.json"), "/dev/")
    outside = [path for path in json.loads((tmp_path / "written.json").read_text()) if not path.startswith(allowed)]
    assert [path for path in outside if Path(path).is_file()] == []
    for folder in (home, work, temporary):
        assert [str(path) for path in folder.rglob("*") if path.is_file()] == []
    assert (tmp_path / "run" / "prompt-cache").is_dir()
