"""Evaluation: held-out prompts, noise that never changes, the deterministic sampler, trained and held-out rewards."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.optimized.noise import KeyedNoise
from branchgrpo.optimized.ranks import Ranks
from branchgrpo.optimized.rollout import rollout
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.reference.errors import BranchGRPOError, InputError
from branchgrpo.reference.method import Method
from branchgrpo.reference.protocols import Condition, Prompt, VelocityModel
from branchgrpo.rewards.reward_set import RewardSet
from branchgrpo.rewards.scoring import Decode, score_leaves
from branchgrpo.training.config.schema import EvaluationConfig
from branchgrpo.training.evaluation.plan import evaluation_plan
from branchgrpo.training.logs.pictures import Recorder, Thumbnails
from branchgrpo.training.monitors.baselines import Scored, relative, reward_gap
from branchgrpo.training.monitors.measure import leaf_distance
from branchgrpo.training.monitors.moments import Moments


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What one evaluation found.

    Attributes:
        prompts: that were sampled.
        scored: every reward model with its mean and std over all samples.
        table: rewards, ``[prompts, samples, models]``, models in the order of ``scored``.
        distance: of two samples of a prompt, mean over prompts; None for one sample a prompt.
        pictures: thumbnails of the first prompts' samples, ``[prompts][samples]``; empty where none were asked for.
    """

    prompts: tuple[Prompt, ...]
    scored: tuple[Scored, ...]
    table: Float64[Tensor, "prompts samples models"]
    distance: float | None
    pictures: list[Thumbnails] = field(default_factory=list)

    def metrics(self, baselines: dict[str, float]) -> dict[str, float]:
        """Numbers for the log and the limits; the first evaluation is noted in ``baselines``.

        ``evaluation/NAME/{mean,std,min,max,stderr}``, ``evaluation/distance``, ``evaluation/diversity``: the distance
        as a share of the first evaluation's, and ``reward_gap``.
        """
        found: dict[str, float] = {}
        for m, s in enumerate(self.scored):
            column = self.table[..., m]
            found |= {f"evaluation/{s.name}/mean": s.mean, f"evaluation/{s.name}/std": s.std}
            found |= {
                f"evaluation/{s.name}/min": float(column.min()),
                f"evaluation/{s.name}/max": float(column.max()),
            }
            error = standard_error(column)
            if error is not None:
                found[f"evaluation/{s.name}/stderr"] = error
        if self.distance is not None:
            found["evaluation/distance"] = self.distance
            found |= relative(found, baselines)
        gap = reward_gap(self.scored, baselines)
        return found if gap is None else found | {"reward_gap": gap}

    def by_prompt(self) -> list[dict[str, Any]]:
        """For every prompt its id, its text and the mean of each reward."""
        means = self.table.mean(dim=1).tolist()
        names = [s.name for s in self.scored]
        return [
            {"id": prompt.id, "text": prompt.text, "rewards": dict(zip(names, row, strict=True))}
            for prompt, row in zip(self.prompts, means, strict=True)
        ]


def standard_error(column: Float64[Tensor, "prompts samples"]) -> float | None:
    """Standard error of the mean: from the spread of the prompts' means, since samples of a prompt are alike.

    With one prompt it is that of its samples; None where a single number is all there is.
    """
    numbers = column.mean(dim=1) if len(column) > 1 else column[0]
    return float(numbers.std(correction=1)) / math.sqrt(len(numbers)) if len(numbers) > 1 else None


def rank_rows(prompts: int, rank: int, size: int) -> list[int]:
    """The prompts that a rank samples: equal numbers, so that all ranks make the same calls; what is over starts anew.

    Put together in rank order, the first ``prompts`` entries are all prompts in order.
    """
    rows = -(-prompts // size)
    return [i % prompts for i in range(rank * rows, (rank + 1) * rows)]


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Draws and scores ``config.samples`` samples of every held-out prompt; the same noise every time.

    Attributes:
        config: samples, steps, seed, size of the grid.
        method: its schedule is the sampler's.
        prompts: held out.
        condition: encodes prompts.
        decode: from latents to what the reward models take; None where they take latents.
        rewards: that train; ``held_out``: that are scored here only.
        sampling: dtypes, device and chunk of the rollouts; noise and iteration are replaced.
        decode_chunk: samples decoded and scored at a time.
    """

    config: EvaluationConfig
    method: Method
    prompts: tuple[Prompt, ...]
    condition: Callable[[Sequence[Prompt]], Condition]
    decode: Decode | None
    rewards: RewardSet
    held_out: RewardSet | None
    sampling: Sampling
    decode_chunk: int = 64

    def __post_init__(self) -> None:
        """Check what can be checked before the first sample.

        Raises:
            InputError: no prompts, or two with the same id, whose noise would be the same.
            OptionError: steps that the schedule cannot have; a reward named twice.
        """
        if not self.prompts:
            raise InputError("evaluation prompts", [], "at least one")
        ids = [prompt.id for prompt in self.prompts]
        for prompt_id in ids:
            if ids.count(prompt_id) > 1:
                raise InputError("evaluation prompts: id", prompt_id, "that of one prompt")
        evaluation_plan(self.method, self.config.samples, self.config.steps)
        self.all_rewards()

    def all_rewards(self) -> RewardSet:
        """Trained and held-out reward models, scored in one pass over the samples."""
        held = () if self.held_out is None else self.held_out.members
        return RewardSet((*self.rewards.members, *held))

    def __call__(self, model: VelocityModel, ranks: Ranks | None = None) -> Evaluation:
        """Evaluate a model: the network itself, not a wrapper that synchronises in its forward pass (DDP).

        Every rank calls it and gets the same result.

        Raises:
            RewardError, ModelError: a missing score, a non-finite sample; the lowest rank's, on every rank.
        """
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        rows = rank_rows(len(self.prompts), rank, size)
        own: tuple[Tensor, Tensor | None, list[Thumbnails]] | None = None
        failed: BranchGRPOError | None = None
        try:
            own = self.sample_and_score(model, tuple(self.prompts[i] for i in rows), rank * len(rows))
        except BranchGRPOError as error:
            if ranks is None:
                raise
            failed = error
        if ranks is not None:
            ranks.agree(failed)
        assert own is not None
        return self.assemble([own] if ranks is None else ranks.everyone(own))

    @torch.no_grad()
    def sample_and_score(
        self, model: VelocityModel, prompts: tuple[Prompt, ...], first: int
    ) -> tuple[Tensor, Tensor | None, list[Thumbnails]]:
        """Rewards, distances and thumbnails of some prompts, the first of which is number ``first`` of all."""
        plan = evaluation_plan(self.method, self.config.samples, self.config.steps)
        sampling = replace(self.sampling, noise=KeyedNoise(self.config.seed), iteration=0)
        leaves = rollout(plan, model, prompts, self.condition(prompts), sampling).leaves
        shown = max(0, min(self.config.grid - first, len(prompts)))
        recorder = Recorder(self.decode, shown * self.config.samples)
        table = score_leaves(leaves, prompts, self.all_rewards(), decode=recorder, chunk=self.decode_chunk)
        distances = leaf_distance(leaves, 1).cpu() if self.config.samples > 1 else None
        return table.cpu(), distances, recorder.rows(self.config.samples)

    def assemble(self, parts: list[tuple[Tensor, Tensor | None, list[Thumbnails]]]) -> Evaluation:
        """One evaluation from the ranks' parts, repeated prompts dropped."""
        count = len(self.prompts)
        table = torch.cat([part[0] for part in parts])[:count]
        distances = [part[1] for part in parts if part[1] is not None]
        distance = float(torch.cat(distances)[:count].mean()) if distances else None
        pictures = [row for part in parts for row in part[2]][: min(self.config.grid, count)]
        members = self.all_rewards().members
        trained = len(self.rewards.members)
        scored = []
        for m, member in enumerate(members):
            found = Moments.of(table[..., m])
            model = member.model
            scored.append(Scored(model.name, member.weight, m >= trained, model.range, found.mean, found.std))
        return Evaluation(self.prompts, tuple(scored), table, distance, pictures)
