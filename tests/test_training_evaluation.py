"""Evaluations: the deterministic sampler on the method's schedule, noise that never changes, numbers by prompt."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import helpers_training_watch as watch
import pytest
import torch
from helpers_optimized import SmallModel, close, prompts_of
from helpers_training_watch import HELD_OUT, REWARDS, Pull, evaluator_of, task_of
from torch import Tensor

from branchgrpo.optimized.noise import KeyedNoise
from branchgrpo.optimized.ranks import Ranks
from branchgrpo.reference.errors import InputError, OptionError, RewardError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.keys import NoiseRole
from branchgrpo.reference.method import Method
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.presets import preset
from branchgrpo.reference.protocols import NoiseKeys
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.rewards.reward_set import RewardSet
from branchgrpo.training.evaluation.evaluate import Evaluation, rank_rows, standard_error
from branchgrpo.training.evaluation.plan import evaluation_plan, evaluation_sigmas, shift_of
from branchgrpo.training.logs.pictures import Recorder, as_frames, thumbnail

METHOD = preset("branchgrpo-widpru")


@pytest.mark.parametrize("name", ["branchgrpo", "dancegrpo", "flowgrpo", "mixgrpo", "g2rpo", "tempflow"])
def test_the_schedule_is_the_methods_with_its_shift(name: str) -> None:
    method = preset(name)
    plan = method.plan_at(0)
    own = evaluation_plan(method, 4)
    assert own.sigmas == plan.sigmas
    assert own.stochastic_steps == ()
    assert (own.roots, own.leaves) == (4, 1)
    assert evaluation_plan(method, 4, plan.steps).sigmas == plan.sigmas
    longer = evaluation_sigmas(method, 40)
    shift = shift_of(plan.sigmas)
    assert shift is not None
    assert longer == pytest.approx(shifted_schedule(40, shift), abs=1e-12)


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0, 7.3])
@pytest.mark.parametrize("steps", [2, 5, 28])
def test_the_shift_is_read_off_the_schedule(steps: int, shift: float) -> None:
    assert shift_of(shifted_schedule(steps, shift)) == pytest.approx(shift, rel=1e-9)


def test_a_schedule_without_a_shift_keeps_its_steps() -> None:
    assert shift_of((1.0, 0.0)) is None
    plan = METHOD.plan_at(0)
    assert isinstance(plan, Plan)
    odd = (1.0, 0.97, *plan.sigmas[2:])
    assert shift_of(odd) is None
    method = replace(METHOD, sampler=replace(plan, sigmas=odd))
    assert evaluation_sigmas(method, 0) == odd
    with pytest.raises(OptionError, match=r"evaluation\.steps = 40: must be 0 or 20"):
        evaluation_sigmas(method, 40)


@pytest.fixture(scope="module")
def found() -> Evaluation:
    model = SmallModel(1)
    return evaluator_of(task_of(model), METHOD)(model)


def test_samples_are_those_of_the_ode_from_keyed_noise(found: Evaluation) -> None:
    model, prompts = SmallModel(1), prompts_of(3)
    keys = NoiseKeys(
        0, NoiseRole.ROOT, 0,
        torch.tensor([p.id for p in prompts]).repeat_interleave(3), torch.arange(3).repeat(3), torch.zeros(9).long(),
    )  # fmt: skip
    x = KeyedNoise(2024).draw(keys, watch.LATENT, torch.float64, torch.device("cpu"))
    condition = task_of(model).condition(prompts).gather(torch.arange(3).repeat_interleave(3))
    sigmas = METHOD.plan_at(0).sigmas
    with torch.no_grad():
        for a, b in pairwise(sigmas):
            x = x + (b - a) * model(x, torch.full((9,), a, dtype=torch.float64), condition)
    for m, reward in enumerate((*REWARDS.models, *HELD_OUT.models)):
        assert close(found.table[..., m].flatten(), reward(x, [p for p in prompts for _ in range(3)]), 1e-9)


def test_the_same_every_time_and_whatever_the_iteration(found: Evaluation) -> None:
    model = SmallModel(1)
    evaluator = evaluator_of(task_of(model), METHOD)
    later = replace(evaluator, sampling=replace(evaluator.sampling, iteration=99, noise=KeyedNoise(1)))
    assert torch.equal(later(model).table, found.table)
    assert not torch.equal(evaluator_of(task_of(model), METHOD, seed=1)(model).table, found.table)


def test_numbers_are_those_of_the_table(found: Evaluation) -> None:
    metrics = found.metrics({})
    assert [s.name for s in found.scored] == ["pull", "push", "far"]
    assert [s.held_out for s in found.scored] == [False, False, True]
    column = found.table[..., 2]
    assert metrics["evaluation/far/mean"] == pytest.approx(float(column.mean()))
    assert metrics["evaluation/far/std"] == pytest.approx(float(column.std(correction=0)))
    means = [math.fsum(row) / 3 for row in column.tolist()]
    centre = math.fsum(means) / 3
    spread = math.sqrt(math.fsum((m - centre) ** 2 for m in means) / 2)
    assert metrics["evaluation/far/stderr"] == pytest.approx(spread / math.sqrt(3))
    assert metrics["evaluation/diversity"] == 1.0
    assert metrics["reward_gap"] == 0.0
    rows = found.by_prompt()
    assert [row["rewards"]["far"] for row in rows] == pytest.approx(means)
    assert [(row["id"], row["text"]) for row in rows] == [(p.id, p.text) for p in prompts_of(3)]


def test_standard_error_of_one_prompt_is_that_of_its_samples_and_of_one_number_none() -> None:
    table = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    assert standard_error(table) == pytest.approx(float(table.std(correction=1)) / math.sqrt(3))
    assert standard_error(table[:, :1]) is None


def test_a_policy_that_moved_shows_against_the_first_evaluation() -> None:
    model = SmallModel(1)
    evaluator, baselines = evaluator_of(task_of(model), METHOD), {}
    evaluator(model).metrics(baselines)
    with torch.no_grad():
        model.bias.mul_(1.5)
    metrics = evaluator(model).metrics(baselines)
    assert metrics["evaluation/diversity"] != 1.0
    assert metrics["reward_gap"] != 0.0


@pytest.mark.parametrize(("prompts", "size"), [(1, 1), (3, 2), (8, 3), (2, 4), (5, 5)])
def test_ranks_share_the_prompts_in_equal_numbers(prompts: int, size: int) -> None:
    rows = [rank_rows(prompts, rank, size) for rank in range(size)]
    assert len({len(row) for row in rows}) == 1
    assert [i for row in rows for i in row][:prompts] == list(range(prompts))
    assert all(len(set(row)) == len(row) for row in rows), "equal ids in one rollout would have equal noise"


class Pair(Ranks):
    """One of two ranks whose other half is already there."""

    def __init__(self, rank: int, parts: list[Any]) -> None:
        super().__init__(rank, 2)
        object.__setattr__(self, "parts", parts)

    def everyone(self, value: Any) -> list[Any]:
        if value is None or isinstance(value, Exception):
            return [value]
        self.parts.append(value)
        return self.parts


def test_parts_of_ranks_put_together_are_the_whole(found: Evaluation) -> None:
    model, parts = SmallModel(1), []
    evaluator = evaluator_of(task_of(model), METHOD)
    evaluator(model, Pair(0, parts))
    together = evaluator(model, Pair(1, parts))
    assert close(together.table, found.table, 1e-12)
    assert together.distance == pytest.approx(found.distance)


class Broken(Pull):
    def __call__(self, samples: Tensor, prompts: list[Any]) -> Tensor:
        scores = super().__call__(samples, prompts)
        scores[1] = math.nan
        return scores


def test_a_missing_score_is_an_error_on_every_rank() -> None:
    model = SmallModel(1)
    evaluator = replace(evaluator_of(task_of(model), METHOD), held_out=RewardSet.of(Broken("broken")))
    for ranks in (None, Pair(0, [])):
        with pytest.raises(RewardError, match="model broken, leaf 1"):
            evaluator(model, ranks)


def test_what_can_be_checked_is_checked_before_the_first_sample() -> None:
    task = task_of(SmallModel(1))
    evaluator = evaluator_of(task, METHOD)
    with pytest.raises(InputError, match="at least one"):
        replace(evaluator, prompts=())
    with pytest.raises(InputError, match="that of one prompt"):
        replace(evaluator, prompts=(*prompts_of(2), prompts_of(2)[1]))
    with pytest.raises(OptionError, match="named once"):
        replace(evaluator, held_out=REWARDS)


def test_a_family_is_evaluated_on_its_full_schedule() -> None:
    method: Method = preset("g2rpo")
    assert isinstance(method.sampler, PlanFamily)
    model = SmallModel(1)
    model.calls.clear()
    evaluator_of(task_of(model), method)(model)
    assert sum(model.calls) >= 9 * method.sampler.steps


def images(items: int, height: int = 4, width: int = 6) -> Tensor:
    return torch.rand(items, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_pictures_of_the_first_prompts_are_kept_and_the_scores_see_whole_samples() -> None:
    model = SmallModel(1)
    task = task_of(model)
    seen: list[int] = []

    def decode(latents: Tensor) -> Tensor:
        seen.append(len(latents))
        return images(len(latents))

    evaluator = replace(evaluator_of(task, METHOD), decode=decode, decode_chunk=4)
    found = evaluator(model)
    assert sum(seen) == 9
    assert [len(row) for row in found.pictures] == [3, 3]
    expected = (images(4)[0] * 255).round().to(torch.uint8).permute(1, 2, 0)
    assert torch.equal(found.pictures[0][0][0], expected)


def test_frames_of_images_videos_and_ink() -> None:
    assert as_frames(images(2)).shape == (2, 1, 3, 4, 6)
    assert as_frames(torch.rand(2, 40, 3, 4, 6)).shape == (2, 16, 3, 4, 6)
    ink = as_frames(torch.tensor([-1.0, 1.0]).reshape(2, 1, 1, 1))
    assert ink.flatten().tolist() == [1.0] * 3 + [0.0] * 3
    assert as_frames(torch.rand(2, 16, 4, 4)) is None
    assert Recorder(None, 3).rows(2) == []


def test_thumbnails_are_small_and_hold_no_surprises() -> None:
    tall = thumbnail(torch.rand(2, 3, 1024, 512))
    assert tall.shape == (2, 256, 128, 3)
    odd = thumbnail(torch.tensor([math.nan, 2.0, -1.0]).reshape(1, 3, 1, 1))
    assert odd.flatten().tolist() == [0, 255, 0]
