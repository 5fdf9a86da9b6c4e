"""An iteration to be watched, here or in one of several processes (``helpers_training_watch.py RANK SIZE FOLDER``)."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers_optimized import LATENT, SmallModel, condition_of, prompts_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from branchgrpo.optimized.noise import KeyedNoise
from branchgrpo.optimized.ranks import Ranks
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.reference.method import Method
from branchgrpo.reference.presets import preset
from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.reward_set import RewardSet
from branchgrpo.training.config.schema import EvaluationConfig, OptimizerConfig, RolloutConfig, UpdateConfig
from branchgrpo.training.engine.distributed import Cluster
from branchgrpo.training.engine.iteration import Clock, Collector, Part, PartOutcome
from branchgrpo.training.engine.policy import Policies
from branchgrpo.training.engine.steps import Updater
from branchgrpo.training.engine.task import Task
from branchgrpo.training.evaluation.evaluate import Evaluator
from branchgrpo.training.monitors.depths import gradient_norms_by_depth
from branchgrpo.training.monitors.measure import measure

PROMPTS = 4
CPU = torch.device("cpu")


class Pull:
    """A reward that wants a mean of 1, or with another factor something else; no leaf is like another."""

    version, range = "1", (-float("inf"), 0.0)

    def __init__(self, name: str = "pull", factor: float = 1.0) -> None:
        self.name, self.factor = name, factor

    def __call__(self, samples: Tensor, prompts: list[Prompt]) -> Tensor:
        flat = samples.double().flatten(1)
        return -self.factor * (flat.mean(dim=1) - 1.0).abs() - 0.1 * flat.std(dim=1)


REWARDS = RewardSet.of(Pull(), Pull("push", -0.5), weights=[1.0, 0.3])
HELD_OUT = RewardSet.of(Pull("far", 2.0))
WEIGHTS = {"pull": 1.0, "push": 0.3}


def sampling(iteration: int = 0) -> Sampling:
    return Sampling(KeyedNoise(5), LATENT, iteration=iteration, chunk=16, pad=True)


def task_of(model: SmallModel) -> Task:
    """A task whose condition depends on the prompt alone, whatever the batch."""
    ids = [prompt.id for prompt in prompts_of(PROMPTS)]

    def condition(prompts: Any) -> Any:
        return condition_of(PROMPTS).gather(torch.tensor([ids.index(prompt.id) for prompt in prompts]))

    return Task(
        network=model,
        latent_shape=LATENT,
        condition=condition,
        prepare=lambda prompts: None,
        decode=None,
        rewards=REWARDS,
        held_out=HELD_OUT,
        device=CPU,
        lora=False,
        autocast=None,
        experts=1,
        unused=False,
    )


def parts_of(task: Task, rank: int, size: int, accumulation: int) -> list[Part]:
    """This rank's prompts, cut into parts."""
    own = prompts_of(PROMPTS)[rank * PROMPTS // size : (rank + 1) * PROMPTS // size]
    step = len(own) // accumulation
    cut = [tuple(own[i : i + step]) for i in range(0, len(own), step)]
    return [Part(prompts, task.condition(prompts)) for prompts in cut]


def outcomes_of(method: Method, task: Task, parts: list[Part], cluster: Cluster) -> list[PartOutcome]:
    plan = method.plan_at(0)
    collector = Collector(task, method, plan, sampling(), cluster, RolloutConfig().decode_chunk, Clock(CPU))
    return collector.collect(task.network, parts, seed=5)


def updater_of(method: Method, model: SmallModel, cluster: Cluster, config: UpdateConfig | None = None) -> Updater:
    trained: Any = model if cluster.ranks is None else DistributedDataParallel(model, gradient_as_bucket_view=True)
    no_sync = nullcontext if cluster.ranks is None else trained.no_sync
    if trained is not model:
        trained.guidance = model.guidance
    policies = Policies(model, trained, None, no_sync, dict(model.named_parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Updater(method, config or UpdateConfig(), policies, optimizer, OptimizerConfig(), 1, None, cluster)


def moved_policy() -> SmallModel:
    return SmallModel(1)


def evaluator_of(task: Task, method: Method, **changes: Any) -> Evaluator:
    config = EvaluationConfig(**{"samples": 3, "grid": 2} | changes)
    prompts = tuple(prompts_of(3))
    return Evaluator(config, method, prompts, task.condition, None, REWARDS, HELD_OUT, sampling(7))


def watched(name: str, cluster: Cluster, accumulation: int) -> dict[str, float]:
    """Everything that is measured in one iteration, and in an evaluation before it."""
    method, model = preset(name), moved_policy()
    method = replace(method, objective=replace(method.objective, kl=0.0))
    task = task_of(model)
    parts = parts_of(task, cluster.rank, cluster.size, accumulation)
    outcomes = outcomes_of(method, task, parts, cluster)
    found = measure(outcomes, method, WEIGHTS, cluster.ranks)
    updater = updater_of(method, model, cluster)
    found |= gradient_norms_by_depth(updater, parts, outcomes)
    return found | evaluator_of(task, method)(model, cluster.ranks).metrics({})


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    cluster = Cluster(rank, size, CPU, Ranks.of_group())
    found = {name: watched(name, cluster, 1) for name in ("branchgrpo-widpru", "g2rpo")}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
