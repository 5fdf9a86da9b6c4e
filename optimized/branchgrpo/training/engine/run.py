"""A run put together: method, task, policies, optimiser, averages, monitors; and one iteration of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from branchgrpo.optimized.kernels import step_coefficients
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import Method
from branchgrpo.reference.options import DepthWindow
from branchgrpo.reference.protocols import Prompt
from branchgrpo.reference.windows import WindowedPlan
from branchgrpo.training.config.method import build_method
from branchgrpo.training.config.schema import TrainConfig
from branchgrpo.training.data.loading import RunPrompts, load_prompts
from branchgrpo.training.data.sampler import Sampler
from branchgrpo.training.engine.distributed import Cluster
from branchgrpo.training.engine.ema import Ema, averaged_weights
from branchgrpo.training.engine.iteration import Clock, Collector, Measured, Part, sampling_of
from branchgrpo.training.engine.optimizer import build_optimizer, check_optimizer
from branchgrpo.training.engine.policy import Policies, build_policies
from branchgrpo.training.engine.score_file import ScoreFile
from branchgrpo.training.engine.steps import Updater, check_steps, steps_an_iteration
from branchgrpo.training.engine.task import DTYPES, Task, build_task
from branchgrpo.training.evaluation.evaluate import Evaluation, Evaluator
from branchgrpo.training.monitors.baselines import relative
from branchgrpo.training.monitors.depths import gradient_norms_by_depth
from branchgrpo.training.monitors.measure import measure
from branchgrpo.training.monitors.steps import update_metrics


@dataclass(frozen=True, eq=False)
class Outline:
    """What of a run is known before anything is loaded.

    Attributes:
        method: of every iteration.
        prompts: to train on, and held out.
        sampler: which prompts an iteration has.
    """

    method: Method
    prompts: RunPrompts
    sampler: Sampler


def check_scales(method: Method, dtype: str) -> None:
    """Refuse steps whose numbers leave the dtype of the arithmetic: they would come out as 0 or ∞.

    Raises:
        OptionError: such a step.
    """
    plan, limits = method.sampler, torch.finfo(DTYPES[dtype])
    if isinstance(plan, WindowedPlan):
        plan = plan.base
    plans = [plan.member(k, stride) for k, stride in plan.members()] if isinstance(plan, PlanFamily) else [plan]
    for item in plans:
        for step in range(item.steps):
            numbers = step_coefficients(item, step)
            for name, value in (("alpha", numbers.alpha), ("gamma", numbers.gamma), ("std", numbers.std)):
                if abs(value) > limits.max or (name == "std" and 0.0 < value < limits.tiny):
                    legal = f"within what rollout.dtype = {dtype!r} holds, {limits.tiny:.2g} to {limits.max:.2g}"
                    raise OptionError(f"method.settings: {name} of step {step}", value, legal)


def outline(config: TrainConfig, cluster: Cluster) -> Outline:
    """Check everything that needs neither weights nor samples.

    Raises:
        OptionError, InputError, PlanError: options that contradict each other or the number of processes, a plan
            without anything to train in some iteration, prompts that cannot be read.
    """
    method = build_method(config.method)
    check_steps(method, config.update)
    check_scales(method, config.rollout.dtype)
    check_optimizer(config.optimizer, cluster.fsdp)
    moving = isinstance(method.sampler, WindowedPlan) or any(isinstance(r, DepthWindow) for r in method.pruning)
    for iteration in range(config.run.iterations if moving else 1):
        method.plan_at(iteration, config.run.seed)
    prompts = load_prompts(config.data)
    sampler = Sampler(prompts.train, config.data.prompts_per_iteration, config.run.seed, config.data.shuffle)
    sampler.part(sampler.batch(0), cluster.rank, cluster.size, 0, config.update.accumulation)
    if config.rollout.pad and not config.rollout.chunk:
        raise OptionError("rollout.pad", True, "false without a rollout.chunk to fill")
    return Outline(method, prompts, sampler)


def needed_prompts(config: TrainConfig, plan: Outline, first: int) -> list[Prompt]:
    """Every prompt that iterations from ``first`` on, or an evaluation, will ask for; each once."""
    found: dict[str, Prompt] = {}
    for iteration in range(first, config.run.iterations):
        if len(found) >= len(plan.prompts.train):
            break
        found |= {prompt.text: prompt for prompt in plan.sampler.batch(iteration)}
    held = plan.prompts.held_out if config.evaluation.every else ()
    return list((found | {prompt.text: prompt for prompt in held}).values())


@dataclass(eq=False)
class Run:
    """A run between two iterations.

    Attributes:
        config, cluster, plan: what was asked for, and where.
        task, policies, updater, evaluator: what it is made of; no evaluator where nothing is evaluated.
        scores: file of all leaves' scores, or None.
        baselines: first values that monitors compare with.
    """

    config: TrainConfig
    cluster: Cluster
    plan: Outline
    task: Task
    policies: Policies
    updater: Updater
    evaluator: Evaluator | None
    scores: ScoreFile | None = None
    baselines: dict[str, float] = field(default_factory=dict)

    @property
    def ema(self) -> Ema | None:
        """The average of the weights, if one is kept."""
        return self.updater.ema

    def parts(self, iteration: int) -> list[Part]:
        """The accumulation parts of an iteration on this rank."""
        batch, count = self.plan.sampler.batch(iteration), self.config.update.accumulation
        chosen = [self.plan.sampler.part(batch, self.cluster.rank, self.cluster.size, i, count) for i in range(count)]
        return [Part(prompts, self.task.condition(prompts)) for prompts in chosen]

    def iterate(self, iteration: int, interrupted: Callable[[], bool] = lambda: False) -> Measured:
        """Roll out, score and train once.

        Raises:
            Abandoned: ``interrupted`` while it was sampled.
            RewardError, ModelError: the lowest rank's, on every rank; the weights are those before the failed step.
        """
        start, clock, config = time.perf_counter(), Clock(self.task.device), self.config
        method, seed = self.plan.method, config.run.seed
        parts = self.parts(iteration)
        if self.scores is not None and self.cluster.main:
            self.scores.mark()
        collector = Collector(
            self.task, method, method.plan_at(iteration, seed),
            sampling_of(config.rollout, self.task, method, seed, iteration),
            self.cluster, config.rollout.decode_chunk, clock, self.scores, interrupted,
        )  # fmt: skip
        outcomes = collector.collect(self.policies.rollout, parts, seed)
        costly: dict[str, float] = {}
        if config.monitors.costly_every and iteration % config.monitors.costly_every == 0:
            with clock.phase("costly"):
                costly = gradient_norms_by_depth(self.updater, parts, outcomes)
        with clock.phase("update"):
            updates, norms, rate = self.updater.improve(parts, outcomes)
        seconds = clock.seconds
        seconds["other"] = max(0.0, time.perf_counter() - start - sum(seconds.values()))
        return Measured(outcomes, updates, norms, rate, costly, seconds)

    def metrics(self, measured: Measured) -> dict[str, float]:
        """The numbers of an iteration over all ranks; the first diversity becomes the baseline."""
        weights = {member.model.name: member.weight for member in self.task.rewards.members}
        numbers = measure(measured.rollouts, self.plan.method, weights, self.cluster.ranks)
        numbers |= relative(numbers, self.baselines)
        return numbers | update_metrics(measured.updates, measured.gradient_norms, measured.learning_rate)  \
            | measured.costly  # fmt: skip

    def evaluate(self) -> tuple[Evaluation, dict[str, float]]:
        """Evaluate the averaged weights, or the trained ones where no average is kept."""
        assert self.evaluator is not None, "asked for only where evaluation.every > 0"
        with averaged_weights(self.policies.weights, self.ema):
            evaluation = self.evaluator(self.policies.rollout, self.cluster.ranks)
        return evaluation, evaluation.metrics(self.baselines)


def build_run(config: TrainConfig, cluster: Cluster, plan: Outline, scores: ScoreFile | None) -> Run:
    """Load the model and the rewards, wrap the policy, make optimiser and averages.

    Raises:
        OptionError, InputError: see ``build_task``, ``build_policies``, ``build_optimizer``, ``Evaluator``.
    """
    method, task = plan.method, build_task(config, cluster)
    sampling = sampling_of(config.rollout, task, method, config.run.seed, 0)
    evaluator = None
    if config.evaluation.every:
        evaluator = Evaluator(
            config.evaluation, method, plan.prompts.held_out, task.condition, task.decode, task.rewards,
            task.held_out, sampling, config.rollout.decode_chunk,
        )  # fmt: skip
    policies = build_policies(task, cluster, method.objective.kl > 0)
    optimizer = build_optimizer(config.optimizer, policies.weights)
    updater = Updater(
        method, config.update, policies, optimizer, config.optimizer,
        config.run.iterations * steps_an_iteration(method, config.update),
        Ema(policies.weights, config.ema) if config.ema.decay else None, cluster,
    )  # fmt: skip
    return Run(config, cluster, plan, task, policies, updater, evaluator, scores)


def facts(run: Run, config_hash: str) -> dict[str, Any]:
    """What the log notes down at a start."""
    trained = sum(parameter.numel() for parameter in run.policies.weights.values())
    return {"config_hash": config_hash, "method": run.plan.method.name, "trained_parameters": trained}
