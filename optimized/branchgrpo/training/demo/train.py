"""One run of the demo: one method, one seed, one budget of denoiser calls."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from branchgrpo.models.digits import LATENT_SHAPE, DigitsVelocity
from branchgrpo.optimized.noise import KeyedNoise
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.reference.counts import count
from branchgrpo.reference.method import Method
from branchgrpo.reference.protocols import Prompt, TensorCondition
from branchgrpo.rewards.digits import DigitsReward
from branchgrpo.training.demo.config import DemoConfig, Tuning, demo_method
from branchgrpo.training.demo.counting import CountingModel
from branchgrpo.training.demo.evaluate import Evaluation, Evaluator
from branchgrpo.training.demo.iteration import Batch, collect, improve
from branchgrpo.training.demo.results import Point, Run
from branchgrpo.training.demo.tree_figure import GrownTree
from branchgrpo.training.digits import (
    digit_condition,
    digit_prompts,
    digits_judge,
    pretrained_classifier,
    pretrained_generator,
)

GRID_ROWS = 8
WEIGHT_DECAY = 1e-4


@dataclass(frozen=True, eq=False)
class Outcome:
    """A run's numbers, samples before and after it (``[rows, 10, 8, 8]``), and one of its first trees."""

    run: Run
    before: NDArray[np.float32]
    after: NDArray[np.float32]
    tree: GrownTree


def prompt_schedule(method: Method, tuning: Tuning, calls: int) -> list[tuple[Prompt, ...]]:
    """The prompts of every iteration: the digits in turn, as many as the budget pays for.

    The last iteration takes fewer prompts, so that the total is within half a prompt's calls of the budget, whatever an
    iteration of the method costs.

    Args:
        method: its plan says what a prompt costs, rollout and update together.
        tuning: prompts an iteration.
        calls: the budget.
    """
    cost = count(method)
    units = max(1, round(calls / (cost.denoiser_calls + cost.trained_parents)))
    digits = digit_prompts()
    turns = [digits[i % len(digits)] for i in range(units)]
    return [tuple(turns[i : i + tuning.prompts]) for i in range(0, units, tuning.prompts)]


def evaluation_moments(iterations: int, evaluations: int) -> list[int]:
    """Iterations after which the policy is evaluated, evenly spaced, the last one included."""
    return [max(1, round(iterations * (i + 1) / evaluations)) for i in range(evaluations)]


def grid(evaluation: Evaluation) -> NDArray[np.float32]:
    """The first samples of every digit, a digit a column."""
    images: NDArray[np.float32] = evaluation.samples[:, :GRID_ROWS, 0].transpose(0, 1).numpy().astype(np.float32)
    return images


def grown_tree(batch: Batch) -> GrownTree:
    """A tree of a batch, the one of the middle prompt, for drawing."""
    tree, plan = batch.tree, batch.tree.plan
    row = len(tree.prompts) // 2
    trainable = set(plan.trainable_steps)
    return GrownTree(
        prompt=tree.prompts[row].text,
        sigmas=plan.sigmas,
        branching=plan.branching,
        states=tuple(level[row, :, 0].float().numpy() for level in tree.states),
        advantages=tuple(level[row].numpy() for level in batch.advantages[1:]),
        trained=tuple(mask[row].numpy() & (step in trainable) for step, mask in enumerate(batch.kept)),
        rewards=batch.rewards[row, :, 0].numpy(),
    )


class Training:
    """A run in progress: the network, its optimiser, the counted calls, and the curve so far."""

    def __init__(self, name: str, seed: int, config: DemoConfig) -> None:
        self.method, self.tuning, self.seed, self.config = demo_method(name), config.tuning[name], seed, config
        self.network: DigitsVelocity = pretrained_generator(config.generator).train()
        self.model = CountingModel(self.network)
        self.reward = DigitsReward(pretrained_classifier(config.classifier), config.reward)
        self.evaluator = Evaluator(config, self.reward, digits_judge(config.generator.split))
        rate = self.tuning.learning_rate
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)
        self.rollout_calls = self.update_calls = self.updates = 0
        self.seconds = 0.0
        self.curve: list[Point] = []

    def evaluate(self) -> Evaluation:
        """Evaluate the policy and add a point to the curve."""
        evaluation = self.evaluator(self.network)
        calls = self.rollout_calls + self.update_calls
        self.curve.append(Point(calls, self.seconds, evaluation.reward, evaluation.judge))
        return evaluation

    def iterate(self, iteration: int, prompts: Sequence[Prompt]) -> list[Batch]:
        """Roll out and update once, with calls counted at the network and time taken; returns what was rolled out."""
        start, before = time.perf_counter(), self.model.calls
        condition: TensorCondition = digit_condition(prompts)
        noise = KeyedNoise(self.seed)
        sampling = Sampling(noise, LATENT_SHAPE, torch.float32, torch.float32, self.method.log_prob, iteration)
        batches = collect(self.method, self.model, prompts, condition, sampling, self.reward)
        middle = self.model.calls
        self.updates += len(improve(self.method, batches, self.model, condition, self.network, self.optimizer))
        self.rollout_calls += middle - before
        self.update_calls += self.model.calls - middle
        self.seconds += time.perf_counter() - start
        return batches


def train(name: str, seed: int, config: DemoConfig, on_progress: Callable[[int, int], None]) -> Outcome:
    """Train one method with one seed.

    Args:
        name: one of the demo's methods.
        seed: of the rollouts' noise.
        config: the demo.
        on_progress: told (calls made, calls planned).

    Raises:
        OptionError: an unknown method.
    """
    training = Training(name, seed, config)
    schedule = prompt_schedule(training.method, training.tuning, config.calls)
    moments = evaluation_moments(len(schedule), config.evaluations)
    first = last = training.evaluate()
    trees: list[GrownTree] = []
    for iteration, prompts in enumerate(schedule):
        batches = training.iterate(iteration, prompts)
        if iteration == 0:
            trees.append(grown_tree(batches[0]))
        on_progress(training.rollout_calls + training.update_calls, config.calls)
        for _ in range(moments.count(iteration + 1)):
            last = training.evaluate()
    run = Run(
        name, seed, len(schedule), training.updates, training.rollout_calls, training.update_calls, training.seconds,
        tuple(training.curve),
    )  # fmt: skip
    on_progress(1, 1)
    return Outcome(run, grid(first), grid(last), trees[0])
