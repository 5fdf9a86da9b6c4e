"""Clauses of spec/reward.md."""

import math

import pytest
import torch
from helpers_judge import JudgeServer
from helpers_rewards import Recorder, pictures
from helpers_spec import build_tree, f64, load_examples, small_plan

from branchgrpo.conformance.clauses import clause
from branchgrpo.optimized.reward import check_rewards as check_batched
from branchgrpo.reference.errors import InputError, OptionError, RewardError
from branchgrpo.reference.normalization import normalize, unclipped_advantages
from branchgrpo.reference.options import Normalization
from branchgrpo.reference.protocols import Prompt
from branchgrpo.reference.reward import check_rewards, score
from branchgrpo.rewards.cache import CachedReward, ScoreCache
from branchgrpo.rewards.endpoint import Endpoint
from branchgrpo.rewards.images import as_images, as_prompts, as_videos
from branchgrpo.rewards.judge import ImageJudge, JudgeOptions
from branchgrpo.rewards.missing import MissingScores
from branchgrpo.rewards.registry import RewardSpec, build_reward
from branchgrpo.rewards.retry import Retry
from branchgrpo.rewards.reward_set import RewardSet
from branchgrpo.rewards.scoring import score_leaves
from branchgrpo.rewards.sharding import as_shard, merge_shards, shard_items

EXAMPLE = load_examples("reward")
EPSILON = 1e-6
"""ε = 1e-8 against the stds of the example, the least of which is 0.026: up to 4e-7 of a value."""


class Toy:
    """Scores that are told."""

    name, version, range = "toy", "1", (-math.inf, math.inf)

    def __init__(self, scores):
        self.scores = scores

    def __call__(self, samples, prompts):
        return self.scores[: len(prompts)]


def combined(values, weights, order):
    """Advantages of four leaves of one split, at the leaves' depth."""
    tree = build_tree(small_plan((0,), steps=1, branching=len(values)))
    rewards = f64(values)
    fused = {tree.root: rewards.mean(dim=0)} | dict(zip(tree.root.leaves(), rewards, strict=True))
    options = Normalization(order=order)
    advantages = unclipped_advantages([tree], fused, weights, options)
    clipped = normalize([tree], fused, weights, options)
    found = torch.stack([advantages[leaf] for leaf in tree.root.leaves()])
    assert torch.equal(torch.stack([clipped[leaf] for leaf in tree.root.leaves()]), found.clamp(-5.0, 5.0))
    return found


@clause("REW-1")
def test_one_finite_float64_a_leaf_and_model_as_it_is():
    tree = build_tree(small_plan((0,), steps=1, branching=3))
    rewards = [torch.tensor([0.1, 7.0, -2.0]), torch.tensor([1e9, -1e9, 0.0])]
    found = score(tree, [Toy(r) for r in rewards])
    for i, leaf in enumerate(tree.root.leaves()):
        assert found[leaf].dtype == torch.float64
        assert found[leaf].tolist() == [r[i].item() for r in rewards]
    prompts = [Prompt(0, "a")] * 3
    with pytest.raises(RewardError, match="one a leaf"):
        check_rewards(torch.zeros(2), prompts, "toy")
    with pytest.raises(RewardError, match="one a leaf"):
        check_batched(torch.zeros(4), prompts, "toy", 3)


@clause("REW-2", "ERR-4")
def test_a_missing_score_is_named_and_the_others_are_in_the_log():
    e, logged = EXAMPLE["missing"], []
    scores = torch.tensor([float(v) for v in e["scores"]])
    with pytest.raises(RewardError) as caught:
        score_leaves(torch.zeros(1, 3, 2), [Prompt(7, "a cat")], RewardSet.of(Toy(scores)), log=logged.extend)
    assert str(caught.value) == e["message"]
    assert [line.value for line in logged] == [None if v == "none" else v for v in e["values_in_the_log"]]
    for check in (
        lambda: check_rewards(scores, [Prompt(7, "a cat")] * 3, "toy"),
        lambda: check_batched(scores, [Prompt(7, "a cat")] * 3, "toy", 3),
    ):
        with pytest.raises(RewardError, match=r"leaf 1, prompt 7 \('a cat'\), model toy"):
            check()


@clause("REW-3")
@pytest.mark.parametrize("chunk", [1, 2, 5, 12])
@pytest.mark.parametrize("world", [1, 3, 5])
def test_prompts_stay_with_their_leaf_in_chunks_and_shards(chunk, world):
    samples, prompts = torch.arange(24.0).view(3, 4, 2), [Prompt(5, "a"), Prompt(2, "b"), Prompt(9, "c")]
    whole = score_leaves(samples, prompts, RewardSet.of(Recorder()), chunk=chunk)
    flat, owners = samples.flatten(0, 1), [p for p in prompts for _ in range(4)]
    shards = []
    for rank in range(world):
        mine = shard_items(12, rank, world)
        shards.append(as_shard(mine, Recorder()(flat[list(mine)], [owners[i] for i in mine]).unsqueeze(1)))
    assert torch.equal(merge_shards(shards, 12).view(3, 4, 1), whole)
    expected = [[1000.0 * p.id + samples[i, j].sum().item() for j in range(4)] for i, p in enumerate(prompts)]
    assert whole[..., 0].tolist() == expected


@clause("REW-4")
def test_weights_and_names_are_checked():
    a, b = Recorder("a"), Recorder("b")
    assert RewardSet.of(a, b, weights=[-1.0, 0.0]).weights == (-1.0, 0.0)
    for weights in ([1.0, math.nan], [1.0, math.inf], [0.0, 0.0], [1.0]):
        with pytest.raises(OptionError):
            RewardSet.of(a, b, weights=weights)
    with pytest.raises(OptionError, match="named once"):
        RewardSet.of(a, Recorder("a"))
    logged = []
    score_leaves(torch.ones(1, 2, 1), [Prompt(0, "")], RewardSet.of(a, b, weights=[1.0, 0.0]), log=logged.extend)
    assert [line.model for line in logged] == ["a", "a", "b", "b"]


@clause("REW-5", "NORM-5")
def test_the_orders_and_their_effect_on_scale():
    e, per_cent, doubled = (EXAMPLE[name] for name in ("orders", "in_per_cent", "weights_doubled"))
    first, second = "normalize_then_sum", "sum_then_normalize"
    values, weights = e["values"], e["weights"]
    scaled = [[per_cent["scale"] * a, b] for a, b in values]
    for order in (first, second):
        printed = ((values, weights, e), (scaled, weights, per_cent), (values, doubled["weights"], doubled))
        for own, by, example in printed:
            torch.testing.assert_close(combined(own, by, order), f64(example[order]), rtol=0, atol=1e-12)
        assert combined(values, weights, order).std().item() == pytest.approx(e[f"spread_of_{order}"], abs=EPSILON)
    correlation = torch.corrcoef(f64(values).T)
    assert correlation[0, 1].item() == pytest.approx(e["correlation"], abs=1e-12)
    w = f64(weights)
    assert e["spread_of_normalize_then_sum"] == pytest.approx((w @ correlation @ w).sqrt().item(), abs=1e-12)
    unchanged = (
        (per_cent[first], e[first]),
        (doubled[first], (2 * f64(e[first])).tolist()),
        (doubled[second], e[second]),
    )
    for found, wanted in unchanged:
        assert found == pytest.approx(wanted, abs=EPSILON)
    assert (combined(scaled, weights, second) - combined(values, weights, second)).abs().max() > 0.5


@clause("REW-6")
def test_images_videos_and_prompts_in_each_others_place():
    images, prompts = pictures(2), [Prompt(0, "a"), Prompt(1, "b")]
    assert len(as_images(images)) == len(as_prompts(prompts, 2)) == 2
    for call in (
        lambda: as_images(prompts),
        lambda: as_prompts(images, 2),
        lambda: as_images(images.unsqueeze(1)),
        lambda: as_videos(images),
        lambda: as_images((images * 255).byte()),
        lambda: as_prompts(["a", "b"], 2),
    ):
        with pytest.raises(InputError, match=r"samples|prompts"):
            call()
    with pytest.raises(InputError, match=r"samples\[1\]"):
        as_images(torch.stack([images[0], images[1] + 0.5]))


@clause("REW-7")
def test_a_version_changes_with_what_is_asked(tmp_path):
    options = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}
    (tmp_path / "q.txt").write_text("Rate {prompt}")
    variants = [{}, {"model": "n"}, {"temperature": 0.5}, {"label": "Score"}, {"high": 10.0}, {"max_tokens": 5}]
    variants.append({"template_file": str(tmp_path / "q.txt")})
    models = [build_reward(RewardSpec("judge", options=options | v)) for v in variants]
    assert len({m.version for m in models}) == len(variants)
    assert {m.name for m in models} == {"unified_reward"}
    assert models[0].range == (1.0, 5.0)
    assert models[4].range == (1.0, 10.0)


@clause("REW-8")
def test_a_cache_answers_equal_content_only():
    model = Recorder()
    reward = CachedReward(model, ScoreCache())
    x = torch.tensor([[1.0], [1.0], [2.0]])
    reward(x, [Prompt(1, "a"), Prompt(1, "a"), Prompt(1, "a")])
    assert model.sizes == [2]
    reward(x[:1], [Prompt(1, "b")])
    reward(x[:1].double(), [Prompt(1, "a")])
    model.version = "other"
    reward(x[:1], [Prompt(1, "a")])
    assert model.sizes == [2, 1, 1, 1]
    faulty = CachedReward(Toy(torch.tensor([math.nan])), ScoreCache())
    assert math.isnan(faulty(x[:1], [Prompt(1, "a")]).item())
    assert len(faulty.cache) == 0


@clause("REW-9")
def test_a_remote_score_is_bounded_and_never_guessed():
    with JudgeServer() as server:
        server.hold_s = 0.02
        options = JudgeOptions(retry=Retry(2, 0.0, 0.0), concurrency=2)
        judge = ImageJudge("judge", Endpoint(server.base_url, "m", 0.5), options)
        faults = ["slow", "half", "garbage", "cut", "outside", "torn"]
        owners = [Prompt(0, "fine"), *(Prompt(i, f"{i} fault:{f}*99!") for i, f in enumerate(faults, start=1))]
        with pytest.raises(MissingScores) as caught:
            judge(pictures(7), owners)
        assert sorted(caught.value.reasons) == [1, 2, 3, 4, 5, 6]
        assert torch.isfinite(caught.value.scores).tolist() == [True] + [False] * 6
        assert server.most_running <= 2 + 2  # the two requests that were given up may still run in the server
        assert len(server.requests) == 1 + 2 * len(faults)
