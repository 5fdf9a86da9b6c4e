"""Rewards by name: what a configuration may ask for, and what it is told when it asks for something else."""

import sys
from pathlib import Path

import pytest
import torch
from helpers_optimized import shapes_unchecked
from helpers_rewards import TINY, pictures, prompts, tiny_clip_folder, tiny_open_clip, write_merges

from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.reference.protocols import RewardModel
from branchgrpo.rewards.cache import CachedReward, ScoreCache
from branchgrpo.rewards.judge import ImageJudge, MotionJudge
from branchgrpo.rewards.registry import NAMES, RewardSpec, build_reward, build_rewards

ENDPOINT = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}


def test_every_reward_has_name_range_and_version(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    checkpoint, _ = tiny_open_clip(tmp_path)
    clip, _ = tiny_clip_folder(tmp_path)
    hps = {"checkpoint": str(checkpoint), "tokenizer": str(write_merges(tmp_path)), "shape": TINY}
    specs = [
        RewardSpec("hps_v2.1", 1.0, hps),
        RewardSpec("pickscore", 0.5, {"source": str(clip), "tokenizer": None}),
        RewardSpec("clip", -0.5, {"source": str(clip)}),
        RewardSpec("judge", 1.0, ENDPOINT),
        RewardSpec("motion_judge", 1.0, ENDPOINT | {"frames": 3, "label": "Motion", "low": 0, "high": 10}),
        RewardSpec("linear", 1.0, {"weight": torch.ones(2)}),
        RewardSpec("quadratic", 1.0, {"target": torch.ones(2), "curvature": 2.0}),
    ]
    rewards = build_rewards(specs)
    assert rewards.weights == (1.0, 0.5, -0.5, 1.0, 1.0, 1.0, 1.0)
    for model in rewards.models:
        low, high = model.range
        assert low < high
        assert model.name
        assert model.version
    assert isinstance(rewards.models[3], ImageJudge)
    assert isinstance(rewards.models[4], MotionJudge)
    assert rewards.models[4].range == (0, 10)


def test_a_cache_wraps_every_reward(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    clip, _ = tiny_clip_folder(tmp_path)
    cache = ScoreCache()
    model = build_reward(RewardSpec("clip", options={"source": str(clip)}), cache)
    assert isinstance(model, CachedReward)
    first = model(pictures(2), prompts()[:2])
    assert torch.equal(model(pictures(2), prompts()[:2]), first)
    assert (model.hits, model.misses) == (2, 2)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (RewardSpec("hps"), "reward.name = 'hps'"),
        (RewardSpec("clip", options={"modle": "x"}), "reward clip: option = 'modle'"),
        (RewardSpec("judge", options=ENDPOINT | {"template": "x {prompt}"}), "option = 'template'"),
        (RewardSpec("judge", options=ENDPOINT | {"tries": 3}), "option = 'tries'"),
        (RewardSpec("judge", options={"model": "m"}), "reward judge: base_url"),
        (RewardSpec("aesthetic"), "reward aesthetic: head"),
        (RewardSpec("colour", options={"target": 5}), "reward colour: options = {'target': 5}: must be of the types"),
        (RewardSpec("colour", options={"target": (0, "a", 1)}), "reward colour: options = .*: must be of the types"),
    ],
)
def test_unknown_and_missing_options_are_named(spec: RewardSpec, named: str) -> None:
    with shapes_unchecked(), pytest.raises(OptionError, match=named):
        build_reward(spec)


def test_names_are_those_of_the_documentation() -> None:
    text = (Path(__file__).parents[1] / "optimized/branchgrpo/rewards/README.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"`{name}`" in text, name


def test_the_absent_hpsv2_package_is_named_with_its_install_line() -> None:
    from branchgrpo.rewards.hpsv2_package import INSTALL

    text = (Path(__file__).parents[1] / "optimized/branchgrpo/rewards/README.md").read_text(encoding="utf-8")
    assert INSTALL in text
    try:
        import hpsv2.src.open_clip  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match=r"hpsv2x==1\.2\.0"):
            build_reward(RewardSpec("hpsv2_package", options={"checkpoint": "x.pt"}))


def test_models_fit_the_protocol() -> None:
    model: RewardModel = build_reward(RewardSpec("judge", options=ENDPOINT))
    assert model.name == "unified_reward"


def test_an_absent_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from branchgrpo.rewards.extras import require

    assert require("json", "rewards").loads("1") == 1
    monkeypatch.setitem(sys.modules, "torchmetrics.image.kid", None)
    with pytest.raises(InputError, match=r"torchmetrics\.image\.kid = .*pip install 'branchgrpo\[rewards\]'"):
        require("torchmetrics.image.kid", "rewards")
