"""Scoring leaves: every reward in its place whatever the chunks, shards and faults, and nothing lost from the log."""

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_rewards import Recorder
from torch import Tensor

from branchgrpo.reference.errors import InputError, OptionError, RewardError
from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.analytic import LinearReward, PromptTargetReward, QuadraticReward
from branchgrpo.rewards.cache import CachedReward, ScoreCache, content_key
from branchgrpo.rewards.decoded import DecodedReward
from branchgrpo.rewards.missing import MissingScores, complete
from branchgrpo.rewards.reward_set import RewardSet, WeightedReward
from branchgrpo.rewards.score_log import JsonLinesLog, LeafScore
from branchgrpo.rewards.scoring import score_leaves
from branchgrpo.rewards.sharding import Shard, as_shard, gather_scores, merge_shards, shard_items

PROMPTS = [Prompt(7, "a cat"), Prompt(3, "a dog"), Prompt(5, "a bird")]


def leaves(seed: int = 0) -> Tensor:
    return torch.randn(3, 4, 2, 2, generator=torch.Generator().manual_seed(seed))


class Faulty(Recorder):
    """Returns NaN, raises with partial scores, or returns too few, for the leaf whose sum it is told."""

    def __init__(self, name: str, victim: float, fault: str) -> None:
        super().__init__(name)
        self.victim, self.fault = victim, fault

    def __call__(self, samples: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        scores = super().__call__(samples, prompts)
        hit = (samples.double().flatten(1).sum(dim=1) - self.victim).abs() < 1e-12
        if not bool(hit.any()) or self.fault == "none":
            return scores
        if self.fault == "short":
            return scores[:-1]
        if self.fault == "crash":
            raise RuntimeError("out of memory")
        scores[hit] = float("nan") if self.fault != "inf" else float("inf")
        if self.fault == "missing":
            raise MissingScores(self.name, prompts, scores, {int(hit.nonzero()): "the judge said nothing"})
        return scores


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 12, 100])
def test_rewards_stay_with_leaf_and_prompt_in_any_chunks(chunk: int) -> None:
    samples, model = leaves(), Recorder()
    found = score_leaves(samples, PROMPTS, RewardSet.of(model), chunk=chunk)
    ids = torch.tensor([7.0, 3.0, 5.0], dtype=torch.float64)
    assert torch.equal(found[..., 0], samples.double().flatten(2).sum(dim=2) + 1000.0 * ids[:, None])
    assert sum(model.sizes) == 12
    assert max(model.sizes) <= chunk


def test_several_models_and_a_decoder_called_once_a_chunk() -> None:
    calls = []

    def decode(latents: Tensor) -> Tensor:
        calls.append(len(latents))
        return 2.0 * latents

    models = RewardSet.of(Recorder("a"), LinearReward(torch.ones(2, 2), 1.0))
    found = score_leaves(leaves(), PROMPTS, models, decode=decode, chunk=5)
    assert calls == [5, 5, 2]
    sums = 2.0 * leaves().double().flatten(2).sum(dim=2)
    assert torch.allclose(found[..., 1], sums + 1.0, atol=1e-12)
    assert torch.allclose(found[..., 0] - sums, torch.tensor([[7.0], [3.0], [5.0]]).double() * 1000, atol=1e-9)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("nan", "score is nan"), ("inf", "score is inf"), ("missing", "the judge said nothing")],
)
def test_one_faulty_score_names_leaf_prompt_model_and_the_others_survive(fault: str, reason: str) -> None:
    samples, logged = leaves(), []
    victim = samples[1, 2].double().sum().item()
    models = RewardSet.of(Faulty("bad", victim, fault), Recorder("good"))
    with pytest.raises(RewardError) as caught:
        score_leaves(samples, PROMPTS, models, chunk=5, log=logged.extend)
    message = str(caught.value)
    assert f"model bad, leaf 2, prompt 3 ('a dog'): {reason}" in message
    assert "good" not in message
    assert len(logged) == 24
    lost = [line for line in logged if line.value is None]
    assert lost == [LeafScore("bad", "test", 3, "a dog", 2, None, reason)]
    kept = {(line.model, line.prompt, line.leaf): line.value for line in logged if line.value is not None}
    assert kept["good", 3, 2] == pytest.approx(victim + 3000.0)
    assert kept["bad", 3, 1] == pytest.approx(samples[1, 1].double().sum().item() + 3000.0)


def test_a_short_answer_names_every_leaf_it_leaves_open() -> None:
    samples, logged = leaves(), []
    models = RewardSet.of(Faulty("bad", samples[0, 1].double().sum().item(), "short"), Recorder("good"))
    with pytest.raises(RewardError, match=r"model bad, leaf 0, prompt 7.*returned shape \(3,\) for 4 leaves"):
        score_leaves(samples, PROMPTS, models, chunk=4, log=logged.extend)
    assert [line.value is None for line in logged] == [True] * 4 + [False] * 20


def test_an_answer_that_is_no_tensor_is_named() -> None:
    class Forgetful(Recorder):
        def __call__(self, samples: Tensor, prompts: Sequence[Prompt]) -> Any:
            return super().__call__(samples, prompts).tolist()

    logged: list[LeafScore] = []
    with pytest.raises(RewardError, match=r"model bad, leaf 3, prompt 5.*bad returned a list, no tensor"):
        score_leaves(leaves(), PROMPTS, RewardSet.of(Forgetful("bad"), Recorder("good")), log=logged.extend)
    assert [line.value is None for line in logged] == [True] * 12 + [False] * 12


def test_a_crash_keeps_its_own_error_and_the_log() -> None:
    samples, logged = leaves(), []
    models = RewardSet.of(Recorder("good"), Faulty("bad", samples[2, 0].double().sum().item(), "crash"))
    with pytest.raises(RuntimeError, match="out of memory"):
        score_leaves(samples, PROMPTS, models, chunk=4, log=logged.extend)
    assert sum(line.value is not None for line in logged if line.model == "good") == 12
    assert [line.error for line in logged if line.model == "bad"][-1] == "not scored: the step failed before"


def test_scoring_checks_its_arguments() -> None:
    with pytest.raises(InputError, match=r"len\(prompts\)"):
        score_leaves(leaves(), PROMPTS[:2], RewardSet.of(Recorder()))
    with pytest.raises(InputError, match="chunk"):
        score_leaves(leaves(), PROMPTS, RewardSet.of(Recorder()), chunk=0)


def test_the_log_file_holds_one_object_a_score(tmp_path: Path) -> None:
    score_leaves(leaves(), PROMPTS, RewardSet.of(Recorder()), log=JsonLinesLog(tmp_path / "scores.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert len(lines) == 12
    assert lines[5] | {"value": 0} == {
        "model": "recorder",
        "version": "test",
        "prompt": 3,
        "text": "a dog",
        "leaf": 1,
        "value": 0,
        "error": None,
    }


def test_reward_sets_are_checked() -> None:
    a, b = Recorder("a"), Recorder("b")
    assert RewardSet.of(a, b, weights=[1.0, 0.0]).weights == (1.0, 0.0)
    assert RewardSet.of(a).models == (a,)
    for build, named in (
        (lambda: RewardSet(()), "rewards"),
        (lambda: RewardSet.of(a, Recorder("a")), "rewards = 'a'"),
        (lambda: RewardSet.of(a, b, weights=[1.0]), "weights"),
        (lambda: RewardSet.of(a, b, weights=[0.0, 0.0]), "not all zero"),
        (lambda: WeightedReward(a, float("nan")), "weight of a"),
    ):
        with pytest.raises(OptionError, match=named):
            build()


def test_decoded_reward_chunks_and_keeps_prompts() -> None:
    samples = leaves()[0]
    reward = DecodedReward(Recorder(), lambda x: 3.0 * x, chunk=3)
    owners = [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    ids = torch.tensor([7.0, 3.0, 5.0, 7.0]).double()
    assert torch.allclose(reward(samples, owners), 3.0 * samples.double().flatten(1).sum(1) + 1000 * ids, atol=1e-9)
    assert (reward.name, reward.version) == ("recorder", "test")
    assert reward(samples[:0], []).shape == (0,)
    with pytest.raises(InputError, match=r"len\(prompts\)"):
        reward(samples, owners[:2])


def test_analytic_rewards_equal_their_formulas() -> None:
    x = leaves()[0].double()
    w, t = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.full((2, 2), 0.25)
    owners = [PROMPTS[i % 3] for i in range(4)]
    linear, quadratic = LinearReward(w, 0.5)(x, owners), QuadraticReward(t, 2.0)(x, owners)
    for i in range(4):
        assert linear[i].item() == pytest.approx((w * x[i]).sum().item() + 0.5)
        assert quadratic[i].item() == pytest.approx(-sum((v - 0.25) ** 2 for v in x[i].flatten().tolist()))
    assert QuadraticReward(t, -1.0).range == (0.0, float("inf"))
    targets = PromptTargetReward({p.id: torch.full((2, 2), float(p.id)) for p in PROMPTS})
    expected = [-((x[i] - owners[i].id) ** 2).mean().item() for i in range(4)]
    assert targets(x, owners).tolist() == pytest.approx(expected)
    with pytest.raises(InputError, match=r"prompts\[1\]\.id = 99"):
        targets(x[:2], [PROMPTS[0], Prompt(99, "?")])
    with pytest.raises(InputError, match="elements"):
        LinearReward(torch.ones(3))(x, owners)
    with pytest.raises(InputError, match="curvature"):
        QuadraticReward(t, 0.0)


def test_expectations_of_analytic_rewards_under_gaussians() -> None:
    """E over N(μ, V·I) by Gauss–Hermite quadrature, exact for these polynomials, against the docstrings' formulas."""
    import numpy as np

    nodes, weights = np.polynomial.hermite_e.hermegauss(4)
    weights = weights / weights.sum()
    grid = torch.tensor([[a, b] for a in nodes for b in nodes])
    mass = torch.tensor([a * b for a in weights for b in weights])
    mu, variance = torch.tensor([0.3, -1.0]).double(), 0.7
    x = mu + variance**0.5 * grid
    owners = [PROMPTS[0]] * len(x)
    w, t = torch.tensor([2.0, -1.0]).double(), torch.tensor([1.0, 0.5]).double()
    r = LinearReward(w, 0.25)(x, owners)
    assert (mass @ r).item() == pytest.approx((w @ mu).item() + 0.25)
    assert (mass @ (r - mass @ r) ** 2).item() == pytest.approx(variance * (w @ w).item())
    q = QuadraticReward(t, 1.5)(x, owners)
    assert (mass @ q).item() == pytest.approx(-0.75 * (((mu - t) ** 2).sum().item() + 2 * variance))


def test_cache_scores_equal_content_once(tmp_path: Path) -> None:
    model, cache = Recorder(), ScoreCache(tmp_path / "scores.sqlite")
    reward = CachedReward(model, cache)
    x = leaves()[0]
    batch, owners = torch.cat([x, x[:2]]), [PROMPTS[0]] * 4 + [PROMPTS[0], PROMPTS[1]]
    first = reward(batch, owners)
    assert model.sizes == [5]
    assert torch.equal(first, Recorder()(batch, owners))
    again = CachedReward(Recorder(), ScoreCache(tmp_path / "scores.sqlite"))
    assert torch.equal(again(batch.flip(0), owners[::-1]), first.flip(0))
    assert (again.hits, again.misses) == (6, 0)
    assert (reward.hits, reward.misses) == (1, 5)
    assert (reward.name, reward.version, len(cache)) == ("recorder", "test", 5)


def test_cache_key_changes_with_everything_that_can_change_the_score() -> None:
    x, prompt, model = leaves()[0, 0], Prompt(1, "a"), Recorder()
    other = Recorder()
    other.version = "other"
    nudged = x.clone()
    nudged[0, 0] = torch.nextafter(nudged[0, 0], torch.tensor(9.0))
    keys = [
        content_key(model, x, prompt),
        content_key(Recorder("b"), x, prompt),
        content_key(other, x, prompt),
        content_key(model, nudged, prompt),
        content_key(model, x.reshape(4), prompt),
        content_key(model, x.double(), prompt),
        content_key(model, x.bfloat16(), prompt),
        content_key(model, x, Prompt(1, "b")),
    ]
    assert len(set(keys)) == len(keys)
    assert content_key(model, x, Prompt(2, "a")) == keys[0]
    assert content_key(model, x.T.contiguous().T, prompt) == keys[0]


def test_cache_keeps_what_was_obtained_and_never_a_fault() -> None:
    x = leaves()[0]
    owners = [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    model = Faulty("bad", x[2].double().sum().item(), "missing")
    reward = CachedReward(model, ScoreCache())
    with pytest.raises(MissingScores) as caught:
        reward(torch.cat([x, x[2:3]]), [*owners, owners[2]])
    assert caught.value.reasons == {2: "the judge said nothing", 4: "the judge said nothing"}
    assert len(reward.cache) == 3
    model.fault = "none"
    assert torch.equal(reward(x, owners), Recorder()(x, owners))
    assert model.sizes == [4, 1]
    nan = CachedReward(Faulty("nan", x[0].double().sum().item(), "nan"), ScoreCache())
    assert nan(x, owners)[0].isnan()
    assert len(nan.cache) == 3


def test_missing_scores_name_their_items_and_survive_pickling() -> None:
    assert complete("judge", PROMPTS, [1.0, 2.0, 3.0], {}).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(MissingScores, match=r"item 1, prompt 3 \('a dog'\): timed out") as caught:
        complete("judge", PROMPTS, [1.0, None, 3.0], {1: "timed out"})
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.reasons == {1: "timed out"}
    assert copy.scores[[0, 2]].tolist() == [1.0, 3.0]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_shards_cover_every_item_once_and_merge_in_any_order(world: int) -> None:
    total = 7
    ranges = [shard_items(total, rank, world) for rank in range(world)]
    assert [i for part in ranges for i in part] == list(range(total))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    scores = torch.arange(14.0).double().view(7, 2)
    shards = [as_shard(part, scores[list(part)]) for part in ranges]
    assert torch.equal(merge_shards(shards[::-1], total), scores)


def test_faulty_shards_are_refused() -> None:
    scores = torch.zeros(2, 1).double()
    for shards, named in (
        ([as_shard([0, 1], scores)], r"without a score = \[2\]"),
        ([as_shard([0, 1], scores), as_shard([1, 2], scores)], "shard 1: item = 1"),
        ([as_shard([0, 3], scores)], "item = 3"),
        ([Shard((), (), "rewards = leaf 3 …"), as_shard([0, 1], scores)], "shard 0 = rewards = leaf 3"),
    ):
        with pytest.raises(RewardError, match=named):
            merge_shards(shards, 3)
    with pytest.raises(InputError, match="rank"):
        shard_items(3, 2, 2)
    with pytest.raises(InputError, match="len"):
        as_shard([0], scores)
    assert gather_scores(as_shard([0, 1], scores), 2).shape == (2, 1)


def exchange(rank: int, world: int, folder: str) -> None:
    """One of two processes: scores its share, or fails if it is told so."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    samples, owners = leaves().flatten(0, 1), [p for p in PROMPTS for _ in range(4)]
    mine = shard_items(12, rank, world)
    scores = Recorder()(samples[list(mine)], [owners[i] for i in mine]).unsqueeze(1)
    merged = gather_scores(as_shard(mine, scores), 12)
    torch.save(merged, f"{folder}/{rank}.pt")
    broken = as_shard(mine, scores) if rank == 0 else Shard((), (), "leaf 3 has no score")
    try:
        gather_scores(broken, 12)
    except RewardError as error:
        Path(f"{folder}/{rank}.txt").write_text(str(error))
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_exchange_their_scores_and_fail_together(tmp_path: Path) -> None:
    """Slow: two new processes import torch."""
    torch.multiprocessing.spawn(exchange, args=(2, str(tmp_path)), nprocs=2)
    expected = Recorder()(leaves().flatten(0, 1), [p for p in PROMPTS for _ in range(4)]).unsqueeze(1)
    for rank in range(2):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), expected)
        assert "leaf 3 has no score" in (tmp_path / f"{rank}.txt").read_text()
