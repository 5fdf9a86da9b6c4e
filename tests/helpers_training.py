"""Small training runs on the digits, in this process or by torchrun, with faults on demand."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from branchgrpo.reference.errors import BranchGRPOError
from branchgrpo.training.checkpoint.read import newest
from branchgrpo.training.config.reading import read_config
from branchgrpo.training.config.schema import TrainConfig
from branchgrpo.training.engine.loop import Hooks, RunResult, train
from branchgrpo.training.engine.run import Run

SMALL = (
    "run.iterations=3",
    "run.device=cpu",
    "method.settings.steps=6",
    "method.settings.splits=[0, 2]",
    "data.prompts_per_iteration=4",
    "optimizer.learning_rate=3e-4",
    "evaluation.every=0",
    "checkpoint.every=0",
    "logging.progress=false",
)
"""A run of about a second."""


def small(folder: Path, *overrides: str, base: Sequence[str] = SMALL) -> TrainConfig:
    return read_config(overrides=(*base, f"run.folder={folder}", *overrides))


def run_small(folder: Path, *overrides: str, **options: Any) -> RunResult:
    return train(small(folder, *overrides), **options)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The weights of the newest checkpoint."""
    checkpoint = newest(folder)
    assert checkpoint is not None, f"no checkpoint in {folder}"
    return load_file(checkpoint / "weights.safetensors")


def records(folder: Path, kind: str = "iteration") -> list[dict[str, Any]]:
    """The lines of one kind of a run's log."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def numbers(folder: Path) -> list[tuple[str, int, dict[str, float]]]:
    """All numbers of a run's log, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["kind"], line["iteration"], line["metrics"]) for line in lines if "metrics" in line]


def largest_difference(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    """Over all weights."""
    assert one.keys() == two.keys()
    return max(float((one[name].double() - two[name].double()).abs().max()) for name in one)


def moved_from_start(folder: Path) -> float:
    """How far the weights have moved from the pretrained ones."""
    from branchgrpo.training.digits import pretrained_generator

    return largest_difference(weights_of(folder), pretrained_generator().state_dict())


class NotANumber:
    """A reward that is NaN for one leaf, from a certain call on."""

    def __init__(self, reward: Any, after: int) -> None:
        self.reward, self.left = reward, after
        self.name, self.version, self.range = reward.name, reward.version, reward.range

    def __call__(self, samples: Any, prompts: Any) -> Any:
        scores = self.reward(samples, prompts)
        self.left -= 1
        if self.left < 0:
            scores[0] = float("nan")
        return scores


def bad_reward(run: Run) -> None:
    from dataclasses import replace

    from branchgrpo.rewards.reward_set import RewardSet

    member = run.task.rewards.members[0]
    run.task = replace(run.task, rewards=RewardSet((replace(member, model=NotANumber(member.model, 1)),)))


def bad_weights(run: Run) -> None:
    with torch.no_grad():
        weight: Any = next(iter(run.policies.weights.values()))
        (weight.to_local() if hasattr(weight, "to_local") else weight).view(-1)[:3] = float("nan")


def broken_code(run: Run) -> None:
    """An error that nobody foresaw, in the middle of an iteration, while the others wait for gradients."""
    inner = run.updater.policies.update

    def fail(*args: Any) -> Tensor:
        raise RuntimeError("a wire came loose")

    inner.__class__ = type("Broken", (type(inner),), {"__call__": lambda self, *args: fail(*args)})


def vanish(run: Run) -> None:
    os._exit(9)


FAULTS: dict[str, Callable[[Run], None]] = {
    "reward": bad_reward,
    "weights": bad_weights,
    "code": broken_code,
    "death": vanish,
}


def torchrun_call(
    folder: Path, *overrides: str, processes: int = 2, fault: str = "", resume: bool = False
) -> dict[str, Any]:
    """Arguments of ``subprocess`` that run this file by torchrun; the fault happens on the last rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    environment |= {"JAXTYPING_DISABLE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", __file__]
    arguments = [str(folder), fault, "resume" if resume else "", *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return {"args": [*command, *arguments], "env": environment, **pipes}


def torchrun(folder: Path, *overrides: str, resume: bool = False) -> subprocess.CompletedProcess[str]:
    """Run this file on two processes."""
    return subprocess.run(**torchrun_call(folder, *overrides, resume=resume), timeout=300)


def main(folder: str, fault: str, resume: str, *overrides: str) -> int:
    """What every process of ``torchrun`` does; errors are one line, as on the command line."""
    torch.set_num_threads(1)
    last = os.environ.get("RANK") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
    hooks = Hooks(on_start=FAULTS[fault] if fault and last else None)
    try:
        run_small(Path(folder), *overrides, resume=resume == "resume", hooks=hooks)
    except BranchGRPOError as error:
        sys.stderr.write(f"MESSAGE {type(error).__name__}: {error}\n")
        return 2
    except RuntimeError as error:
        sys.stderr.write(f"MESSAGE {type(error).__name__}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
