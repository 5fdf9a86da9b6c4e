"""The reward of the digits, its classifier and the judge."""

import pytest
import torch
from helpers_optimized import shapes_unchecked

from branchgrpo.reference.errors import InputError, OptionError, RewardError
from branchgrpo.reference.protocols import Prompt
from branchgrpo.reference.reward import check_rewards
from branchgrpo.rewards.digits import DigitClassifier, DigitsReward, DigitsRewardConfig, stroke_weight
from branchgrpo.rewards.digits_judge import DigitJudge
from branchgrpo.training.digits_classifier import ClassifierConfig, augment, train_classifier
from branchgrpo.training.digits_data import load_part


@pytest.fixture(scope="module")
def reward():
    torch.manual_seed(0)
    return DigitsReward(DigitClassifier(4))


def prompts_of(labels):
    return [Prompt(int(label), str(int(label))) for label in labels]


def test_stroke_weight_runs_from_white_to_black_and_stops_at_the_screen():
    levels = torch.tensor([-7.0, -1.0, 0.0, 1.0, 9.0]).view(5, 1, 1, 1).expand(5, 1, 8, 8)
    assert stroke_weight(levels).tolist() == [0.0, 0.0, 0.25, 1.0, 1.0]


def test_reward_is_the_stated_formula(reward):
    data = load_part("generator")
    images, prompts = data.images[:20], prompts_of(data.labels[:20])
    log_p = reward.classifier(images).double().log_softmax(dim=1)[torch.arange(20), data.labels[:20]]
    weight = ((images.double() + 1.0) / 2.0).square().mean(dim=(1, 2, 3))
    expected = 0.3 * log_p - 20.0 * (weight - 0.30).abs()
    assert torch.allclose(reward(images, prompts), expected, rtol=1e-6, atol=0.0)  # float32 logits
    assert reward(images, prompts).dtype == torch.float64
    assert torch.equal(reward(images.flatten(1), prompts), reward(images, prompts))


def test_reward_stays_in_its_range_whatever_the_samples(reward):
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 1.0, 30.0, 1e6):
        samples = scale * torch.randn(50, 1, 8, 8, generator=generator)
        values = reward(samples, prompts_of(range(10)) * 5)
        assert reward.range == (-10.0, 0.0)
        assert bool(((values >= -10.0) & (values <= 0.0)).all())
    black = torch.ones(1, 1, 8, 8)
    assert float(reward(black, prompts_of([3]))) == -10.0
    assert torch.equal(reward(50.0 * black, prompts_of([3])), reward(black, prompts_of([3])))


def test_reward_of_a_sample_does_not_depend_on_the_batch(reward):
    images = load_part("judge").images[:6].double()
    prompts = prompts_of(range(6))
    alone = torch.cat([reward(images[i : i + 1], prompts[i : i + 1]) for i in range(6)])
    assert torch.allclose(reward(images, prompts), alone, rtol=1e-6, atol=1e-6)  # float32 convolution


def test_a_non_finite_sample_is_named_by_the_check(reward):
    images = torch.zeros(2, 1, 8, 8)
    images[1, 0, 3, 3] = float("nan")
    prompts = prompts_of([4, 7])
    with pytest.raises(RewardError, match=r"reward of leaf 1, prompt 7 .*digits"):
        check_rewards(reward(images, prompts), prompts, reward.name)


def test_wrong_input_is_named(reward):
    images = torch.zeros(2, 1, 8, 8)
    with pytest.raises(InputError, match=r"len\(prompts\) = 1: must be 2"):
        reward(images, prompts_of([1]))
    with pytest.raises(InputError, match=r"samples\.shape"):
        reward(torch.zeros(2, 1, 7, 8), prompts_of([1, 2]))
    for text in ("ten", "12", "", "½", "³", "-1"):
        with pytest.raises(InputError, match="text of prompt 0"):
            reward(images, [Prompt(0, text), Prompt(1, "1")])
    for bad in ({"target_weight": 1.5}, {"stroke_factor": -1.0}, {"digit_factor": float("inf")}, {"floor": 0.0}):
        with pytest.raises(OptionError, match=rf"digits_reward\.{next(iter(bad))}"):
            DigitsRewardConfig(**bad)
    for bad in ({"floor": "low"}, {"target_weight": True}, {"digit_factor": None}):
        with (
            shapes_unchecked(),
            pytest.raises(OptionError, match=rf"digits_reward\.{next(iter(bad))} = .*: must be a number"),
        ):
            DigitsRewardConfig(**bad)


def test_the_judge_reads_images_it_has_not_seen():
    data, others = load_part("judge"), load_part("classifier")
    judge = DigitJudge(data.images, data.labels)
    assert judge.accuracy(others.images, prompts_of(others.labels)) > 0.98  # 599 real images; measured 0.99
    wrong = prompts_of((others.labels + 1) % 10)
    assert judge.accuracy(others.images, wrong) < 0.02
    with pytest.raises(InputError, match="samples = 'NaN or ±inf'"):
        judge.read(torch.full((1, 1, 8, 8), float("nan")))
    with pytest.raises(InputError, match=r"len\(prompts\) = 0"):
        judge.accuracy(torch.zeros(0, 1, 8, 8), [])


def test_augmentation_moves_little_and_only_inside_the_range():
    config, data = ClassifierConfig(), load_part("classifier")
    still = ClassifierConfig(turn=0.0, shift=0.0, noise=0.0)
    moved = augment(data.images, config, torch.Generator().manual_seed(0))
    assert float(moved.min()) >= -1.0
    assert float(moved.max()) <= 1.0
    scaled = augment(data.images, still, torch.Generator().manual_seed(0))
    gaps = [float((images - data.images).abs().mean()) for images in (scaled, moved)]
    assert 0.0 < gaps[0] < gaps[1] < 0.5


def test_a_short_training_reads_most_digits():
    config = ClassifierConfig(channels=8, steps=400, batch=64)
    before = torch.random.get_rng_state()
    model = train_classifier(config, load_part("classifier"))
    assert torch.equal(torch.random.get_rng_state(), before)
    held_out = load_part("judge")
    with torch.no_grad():
        accuracy = float((model(held_out.images).argmax(dim=1) == held_out.labels).float().mean())
    assert accuracy > 0.8  # measured 0.93; guessing gives 0.1
