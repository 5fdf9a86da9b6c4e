"""The optimiser's steps of one iteration: gradients accumulated over parts, clipped, applied."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from branchgrpo.optimized.update import Parallel, UpdateStats, accumulate_gradients, trained_stds
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import Method
from branchgrpo.training.config.schema import OptimizerConfig, UpdateConfig
from branchgrpo.training.engine.distributed import Cluster
from branchgrpo.training.engine.ema import Ema
from branchgrpo.training.engine.iteration import Part, PartOutcome
from branchgrpo.training.engine.optimizer import clip_gradients, learning_rate, set_learning_rate
from branchgrpo.training.engine.policy import Policies

Group = list[PartOutcome]
"""The outcomes of one step of the optimiser, over all parts of this rank."""


def member_steps(method: Method, config: UpdateConfig) -> bool:
    """Whether every member k of a plan family has a step of the optimiser of its own."""
    return isinstance(method.sampler, PlanFamily) and config.step_per == "member"


def check_steps(method: Method, config: UpdateConfig) -> None:
    """Raise ``OptionError`` for step weights within steps that train one denoising step each (OBJ-6)."""
    if (
        isinstance(method.sampler, PlanFamily)
        and config.step_per == "member"
        and method.objective.edge_weights == "std"
    ):
        legal = "'iteration' where objective.edge_weights = 'std': within one member all weights are 1"
        raise OptionError("update.step_per", "member", legal)


def steps_an_iteration(method: Method, config: UpdateConfig) -> int:
    """Steps of the optimiser after one rollout."""
    sampler = method.sampler
    members = len(sampler.ks) if isinstance(sampler, PlanFamily) and member_steps(method, config) else 1
    return config.inner_epochs * members


def groups_of(outcomes: Sequence[PartOutcome], step_per: str) -> list[Group]:
    """What each step of the optimiser trains on: everything, or one member k of a plan family (OBJ-1, DIV-G5)."""
    if step_per == "iteration":
        return [list(outcomes)]
    members = dict.fromkeys(outcome.member for outcome in outcomes)
    return [[o for o in outcomes if o.member == member] for member in members]


def merged(parts: Sequence[UpdateStats]) -> UpdateStats:
    """Statistics of the accumulations of one step, each over its own share of the trees."""
    edges = sum(s.edges for s in parts)
    return UpdateStats(
        objective=math.fsum(s.objective for s in parts),
        clip_fraction=math.fsum(s.clip_fraction * s.edges for s in parts) / edges,
        ratio_mean=math.fsum(s.ratio_mean * s.edges for s in parts) / edges,
        ratio_min=min(s.ratio_min for s in parts),
        ratio_max=max(s.ratio_max for s in parts),
        kl=math.fsum(s.kl for s in parts),
        edges=edges,
        parents=sum(s.parents for s in parts),
        batches=sum(s.batches for s in parts),
    )


@dataclass(eq=False)
class Updater:
    """Turns outcomes into new weights.

    Attributes:
        method, config: objective; accumulation, micro-batches, inner epochs, clipping.
        policies: the networks and the weights.
        optimizer, rates: and its learning rates, over ``total`` steps.
        ema: average of the weights, or None.
        cluster: the processes.
        step: steps of the optimiser so far.
    """

    method: Method
    config: UpdateConfig
    policies: Policies
    optimizer: torch.optim.Optimizer
    rates: OptimizerConfig
    total: int
    ema: Ema | None
    cluster: Cluster
    step: int = 0

    def gradients(self, parts: Sequence[Part], group: Group) -> UpdateStats:
        """Accumulate the gradient of −J over all parts: exactly that of the whole batch, averaged over ranks once.

        Clause: OBJ-7.
        """
        total = self.cluster.size * sum(len(o.tree.prompts) * o.tree.plan.roots for o in group)
        stds = trained_stds([o.tree for o in group], [o.kept for o in group], self.cluster.ranks)
        found = []
        for i, part in enumerate(parts):
            mine = [o for o in group if o.part == i]
            last = i == len(parts) - 1
            ranks = self.cluster.ranks
            parallel = None
            if ranks is not None:
                parallel = Parallel(ranks, no_sync=self.policies.no_sync if last else nullcontext)
            with nullcontext() if last else self.policies.no_sync():
                found.append(
                    accumulate_gradients(
                        [o.tree for o in mine],
                        self.policies.update,
                        part.condition,
                        [o.advantages for o in mine],
                        [o.kept for o in mine],
                        self.method.objective,
                        micro_batch=self.config.micro_batch or None,
                        reference_model=self.policies.reference,
                        total_trees=total,
                        all_stds=stds,
                        parallel=parallel,
                    )
                )
        return merged(found)

    def take(self, parts: Sequence[Part], group: Group) -> tuple[UpdateStats, float, float]:
        """One step of the optimiser: its statistics, its gradient norm before clipping, its learning rate.

        Raises:
            ModelError: a velocity or gradient that is not finite; the weights have not changed.
        """
        self.optimizer.zero_grad(set_to_none=True)
        stats = self.gradients(parts, group)
        norm = clip_gradients(self.policies.weights, self.config.max_grad_norm)
        rate = learning_rate(self.rates, self.step, self.total)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.policies.weights, self.step)
        self.step += 1
        return stats, norm, rate

    def improve(
        self, parts: Sequence[Part], outcomes: Sequence[PartOutcome]
    ) -> tuple[list[UpdateStats], list[float], float]:
        """All steps after one rollout, old log-probabilities frozen (OBJ-1)."""
        groups = groups_of(outcomes, self.config.step_per)
        taken = [self.take(parts, group) for _ in range(self.config.inner_epochs) for group in groups]
        self.optimizer.zero_grad(set_to_none=True)
        return [stats for stats, _, _ in taken], [norm for _, norm, _ in taken], taken[-1][2]
