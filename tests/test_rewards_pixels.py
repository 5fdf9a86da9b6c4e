"""Rewards of pixels against sums written out."""

import pytest
import torch

from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.pixels import ColourReward, ContrastReward
from branchgrpo.rewards.registry import RewardSpec, build_reward

PROMPTS = [Prompt(0, "a"), Prompt(1, "b")]


def test_colour_is_the_squared_distance_of_the_mean_colour() -> None:
    images = torch.zeros(2, 3, 2, 2)
    images[0, 0] = 1.0
    images[1, 1, 0, 0] = 1.0
    scores = ColourReward((1.0, 0.0, 0.5))(images, PROMPTS)
    assert scores.tolist() == pytest.approx([-0.25, -(1.0 + 0.25**2 + 0.25)])


def test_contrast_is_the_standard_deviation_of_all_values() -> None:
    images = torch.full((2, 3, 2, 2), 0.25)
    images[1, :, 0] = 0.75
    assert ContrastReward()(images, PROMPTS).tolist() == pytest.approx([0.0, 0.25])


@pytest.mark.parametrize("reward", [ColourReward(), ContrastReward()])
def test_a_video_is_scored_over_all_frames(reward: ColourReward | ContrastReward) -> None:
    video = torch.rand(2, 4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    mosaic = video.permute(0, 2, 3, 1, 4).flatten(3)
    assert reward(video, PROMPTS).tolist() == pytest.approx(reward(mosaic, PROMPTS).tolist())
    low, high = reward.range
    assert all(low <= score <= high for score in reward(video, PROMPTS).tolist())


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(OptionError, match="three numbers"):
        ColourReward((0.5, 2.0, 0.0))
    with pytest.raises(InputError, match=r"len\(prompts\) = 1"):
        ContrastReward()(torch.zeros(2, 3, 2, 2), PROMPTS[:1])
    with pytest.raises(InputError, match="samples"):
        ColourReward()(torch.full((2, 3, 2, 2), -1.0), PROMPTS)


def test_they_are_built_by_name() -> None:
    built = build_reward(RewardSpec("colour", options={"target": (1.0, 0.0, 0.0)}))
    assert built(torch.zeros(2, 3, 2, 2), PROMPTS).tolist() == [-1.0, -1.0]
    assert build_reward(RewardSpec("contrast")).name == "contrast"
