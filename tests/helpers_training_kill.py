"""A fork server of small training runs that can be killed: ``python helpers_training_kill.py``.

It imports everything once, then forks a run for every line of JSON that it reads, kills it as the line says, and
answers with a line: the import would cost more than a run.
"""

import contextlib
import copy
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ITERATIONS = 21
EVERY = 3
SHORT = 4
"""Iterations of a run on the tiny FLUX, saved every other one."""
LIMIT_S = 120.0
"""Longest life of a run, and of a rank after the other one was killed."""


@dataclass(frozen=True)
class Job:
    """One run, and its end.

    Attributes:
        folder: of the run.
        resume: go on there.
        ranks: processes.
        rank: the one that is killed.
        stage, save: killed at this stage of the save number ``save`` (from 1) of the process; "" for another moment.
        iteration: killed after this one was done, or after the start for −1; None for never.
        wait_s: so much later after the start.
        part: so much later after an iteration, as a part of the time that this one took.
        parallel: ``auto`` or ``fsdp2``.
        adapter: train an adapter on a tiny FLUX in place of the digits.
    """

    folder: str
    resume: bool = False
    ranks: int = 1
    rank: int = 0
    stage: str = ""
    save: int = 2
    iteration: int | None = None
    wait_s: float = 0.0
    part: float = 0.0
    parallel: str = "auto"
    adapter: bool = False


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        codes: exit code of every rank, −9 for a killed one.
        done: iterations that rank 0 had finished.
        ready_s: from the fork to the first iteration's start.
        after_kill_s: from the kill to the last rank's end.
    """

    codes: list[int]
    done: int
    ready_s: float
    after_kill_s: float


def config_of(job: Job) -> Any:
    """Moving window, accumulation, average, KL, schedule, evaluations and scores, as small as it gets."""
    from branchgrpo.training.config.reading import config_from

    tree: dict[str, Any] = {
        "run": {
            "folder": job.folder,
            "iterations": ITERATIONS,
            "seed": 5,
            "parallel": job.parallel,
            "device": "cpu",
        },
        "method": {
            "preset": "mixgrpo",
            "settings": {"steps": 5, "group": 3, "window": 2, "period": 2},
            "objective": {"kl": 0.02},
        },
        "data": {"prompts_per_iteration": 4},
        "update": {"accumulation": 2, "inner_epochs": 2},
        "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.1},
        "ema": {"decay": 0.8, "every": 2},
        "evaluation": {"every": 6, "samples": 1, "steps": 2, "grid": 0},
        "checkpoint": {"every": EVERY, "keep": 2},
        "logging": {"progress": False, "scores": True},
    }
    if job.adapter:
        tree["model"] = {"source": "tiny-flux", "lora": {"rank": 2, "alpha": 4}}
        tree["rewards"] = [{"name": "colour"}]
        tree["run"]["iterations"], tree["checkpoint"]["every"], tree["evaluation"]["every"] = SHORT, 2, 0
    return config_from(tree)


def run(job: Job, rank: int, note: int, started: float) -> None:
    """The forked process: train, and die at a stage if the job says so.

    Args:
        job: what to do.
        rank: this process.
        note: file descriptor; a line for the start and each iteration.
        started: when the server forked.
    """
    from branchgrpo.training.engine.loop import Hooks, train

    saves = 0

    def stage(name: str) -> None:
        nonlocal saves
        saves += name == "half-written"
        if name == job.stage and rank == job.rank and saves == job.save:
            os.kill(os.getpid(), signal.SIGKILL)

    def iterated(iteration: int, metrics: Mapping[str, float]) -> None:
        if rank == 0:
            os.write(note, f"{iteration} {time.monotonic() - started}\n".encode())
        if rank == job.rank and job.iteration is not None and iteration > job.iteration:
            time.sleep(LIMIT_S)  # on a busy machine the kill may be late: the run waits for it

    def ready(run: Any) -> None:
        if rank == 0:
            os.write(note, f"ready {time.monotonic() - started}\n".encode())

    train(config_of(job), resume=job.resume, hooks=Hooks(iterated, stage, ready))


def fork(job: Job, rank: int, note: int, port: int, started: float) -> int:
    """Start one rank; its process id."""
    process = os.fork()
    if process:
        return process
    try:
        if job.ranks > 1:
            rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
            os.environ |= rendezvous | {
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(job.ranks),
                "ACCELERATE_USE_CPU": "1",
            }
        run(job, rank, note, started)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def free_port() -> int:
    """A port that is free and below those that the system gives to whoever asks for any."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


@dataclass(frozen=True)
class Notes:
    """What rank 0 has noted: the last iteration that was done, −1 for none; its seconds; when the run was ready."""

    iteration: int
    seconds: float
    ready_s: float


def notes(path: Path) -> Notes:
    lines = [line.split() for line in path.read_text().splitlines()]
    times = [float(seconds) for _, seconds in lines]
    if len(lines) < 2:
        return Notes(-1, 0.0, times[0] if times else 0.0)
    return Notes(int(lines[-1][0]), times[-1] - times[-2], times[0])


def import_flux() -> None:
    """What a run on the tiny FLUX imports; once, before the first of them is forked."""
    import peft  # noqa: F401
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline  # noqa: F401
    from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer  # noqa: F401

    from branchgrpo.models.auto import import_backbones

    import_backbones()


def carry_out(job: Job) -> Ended:
    """Fork the ranks, kill one when its moment has come, and wait for all."""
    if job.adapter:
        import_flux()
    path = Path(job.folder).with_suffix(".notes")
    path.write_text("")
    note = os.open(path, os.O_WRONLY | os.O_APPEND)
    started, port = time.monotonic(), free_port()
    living = {fork(job, rank, note, port, started): rank for rank in range(job.ranks)}
    os.close(note)
    codes, doomed = [0] * job.ranks, next(p for p, rank in living.items() if rank == job.rank)
    moment: float | None = None  # when the kill is due
    killed = started
    if job.iteration == -1:
        moment = started + job.wait_s
    while living:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            codes[living.pop(process)] = os.waitstatus_to_exitcode(status)
            killed = time.monotonic() if process == doomed else killed
            continue
        now = time.monotonic()
        if job.iteration is not None and moment is None:
            noted = notes(path)
            moment = now + job.part * noted.seconds if noted.iteration >= job.iteration else None
        if moment is not None and now >= moment and doomed in living:
            os.kill(doomed, signal.SIGKILL)
            moment = float("inf")
        if now - started > LIMIT_S:
            for other in living:
                os.kill(other, signal.SIGTERM)
                os.kill(other, signal.SIGKILL)
            started = now
        time.sleep(0.0005)
    end = time.monotonic()
    noted = notes(path)
    return Ended(codes, noted.iteration + 1, noted.ready_s, end - killed)


def small_digits() -> None:
    """From here on this process trains a digits network of 1,704 weights that nobody has pretrained."""
    import torch

    from branchgrpo.models.digits import DigitsConfig, DigitsVelocity
    from branchgrpo.rewards.digits import DigitClassifier
    from branchgrpo.training.engine import digits_task

    torch.manual_seed(1)
    network, classifier = DigitsVelocity(DigitsConfig(8, 8, 1, 4)).eval(), DigitClassifier(2).eval()
    torch.nn.init.normal_(network.output.weight)
    digits_task.pretrained_generator = lambda *_: copy.deepcopy(network)
    digits_task.pretrained_classifier = lambda *_: classifier


def serve() -> None:
    """Import, make the digits as small as they get, then answer until the input ends."""
    import accelerate  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import tomlkit  # noqa: F401
    import torch
    import torch._dynamo  # imported by every optimiser
    import torch.distributed.fsdp

    import branchgrpo.training.engine.loop  # noqa: F401

    torch.set_num_threads(1)
    small_digits()
    answer({"ready": True})
    for line in sys.stdin:
        answer(asdict(carry_out(Job(**json.loads(line)))))


def answer(content: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


class ForkServer:
    """The tests' side: a context manager that carries out jobs one after another."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "server.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=environment,
            )  # fmt: skip
        self.receive()

    def receive(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the server ended:\n{self.log.read_text()}")
        return json.loads(line)

    def __call__(self, job: Job) -> Ended:
        self.process.stdin.write(json.dumps(asdict(job)) + "\n")
        self.process.stdin.flush()
        return Ended(**self.receive())

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=LIMIT_S)


def moments(count: int, seed: int) -> list[tuple[int, float]]:
    """Random moments, one after each of the first iterations of a run (the first one before any is done): the
    iteration, and a part of its length."""
    draw = random.Random(seed)
    return [(i - 1, draw.random()) for i in range(count)]


if __name__ == "__main__":
    serve()
