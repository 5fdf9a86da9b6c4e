"""The demo's runs: budgets, counting, evaluation, determinism."""

from dataclasses import replace

import pytest
import torch
from helpers_demo import double, say_slowly

from branchgrpo.models.digits import DigitsConfig, DigitsVelocity
from branchgrpo.reference.counts import count
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.protocols import Guidance, TensorCondition
from branchgrpo.training.demo.config import LABELS, DemoConfig, Tuning, demo_method, quick_config
from branchgrpo.training.demo.counting import CountingModel
from branchgrpo.training.demo.evaluate import Evaluator
from branchgrpo.training.demo.train import evaluation_moments, prompt_schedule, train
from branchgrpo.training.demo.workers import Pool, Task
from branchgrpo.training.digits_generator import GeneratorConfig

SMALL = GeneratorConfig(DigitsConfig(width=16, hidden=16, blocks=1, frequencies=4), steps=20, batch=32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A configuration of a second, with a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRANCHGRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        base = quick_config()
        classifier = replace(base.classifier, channels=4, steps=5)
        tuning = {name: Tuning(1e-3, prompts=2) for name in LABELS}
        config = replace(base, calls=1900, samples=3, evaluations=2, generator=SMALL, classifier=classifier)
        yield replace(config, tuning=tuning)


def test_the_methods_are_the_published_presets_in_size():
    counts = {name: count(demo_method(name)) for name in LABELS}
    assert {name: c.steps for name, c in counts.items()} == dict.fromkeys(LABELS, 16)
    assert (counts["branchgrpo"].leaves, counts["dancegrpo"].leaves) == (16, 16)
    # 2 levels of 1, 3 of 2, 2 of 4 … under splits (0, 2, 5, 7): 1 + 2·2 + 3·4 + 2·8 + 8·16 parents
    assert counts["branchgrpo"].denoiser_calls == 1 + 2 * 2 + 3 * 4 + 2 * 8 + 8 * 16
    assert counts["dancegrpo"].denoiser_calls == 1 + 15 * 16
    assert counts["g2rpo"].denoiser_calls == 1820
    with pytest.raises(OptionError, match="method = 'ppo'"):
        demo_method("ppo")


def test_every_method_gets_the_same_calls_within_one_percent():
    config, totals = DemoConfig(), []
    for name in LABELS:
        cost = count(demo_method(name))
        prompts = sum(map(len, prompt_schedule(demo_method(name), config.tuning[name], config.calls)))
        totals.append(prompts * (cost.denoiser_calls + cost.trained_parents))
    assert max(totals) <= 1.01 * min(totals)


def test_prompts_come_in_turn_and_only_the_last_iteration_is_short():
    schedule = prompt_schedule(demo_method("branchgrpo"), Tuning(1e-3, prompts=4), 10 * 306)
    assert [[p.id for p in prompts] for prompts in schedule] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_evaluations_are_spread_evenly_and_end_with_the_run():
    assert evaluation_moments(100, 4) == [25, 50, 75, 100]
    assert evaluation_moments(2, 4) == [1, 1, 2, 2]
    assert evaluation_moments(1, 3) == [1, 1, 1]


def test_calls_are_items_and_the_velocity_is_the_models():
    model = DigitsVelocity(SMALL.network, Guidance("classifier_free", 2.0))
    counting = CountingModel(model)
    x, condition = torch.randn(5, 1, 8, 8), TensorCondition({"label": torch.arange(5)})
    v = counting(x, torch.full((5,), 0.5), condition)
    counting(x[:2], torch.full((2,), 0.5), condition.gather(torch.arange(2)))
    assert counting.calls == 7
    assert counting.guidance == model.guidance
    assert torch.equal(v, model(x, torch.full((5,), 0.5), condition))


class Ink:
    """A reward that is the mean pixel, and a judge that sees every digit."""

    name, version, range = "ink", "1", (-1.0, 1.0)

    def __call__(self, samples, prompts):
        return samples.double().flatten(1).mean(dim=1)

    def accuracy(self, samples, prompts):
        return sum(prompt.id for prompt in prompts) / len(prompts)


def test_evaluation_is_the_ode_from_fixed_noise():
    class Toward(torch.nn.Module):
        """The exact velocity of data that are all equal to the label / 10: x⁰ = (x − σ v) at every σ."""

        guidance = Guidance()

        def forward(self, x, sigma, condition):
            target = condition.tensors["label"].view(-1, 1, 1, 1).float() / 10.0
            return (x - target) / sigma.view(-1, 1, 1, 1)

    evaluate = Evaluator(DemoConfig(samples=4), Ink(), Ink())
    first, second = evaluate(Toward()), evaluate(Toward())
    assert first.samples.shape == (10, 4, 1, 8, 8)
    expected = torch.arange(10).view(10, 1, 1, 1, 1) / 10.0
    # 16 float32 steps of numbers of order 1: 16 · 2⁻²⁴ · a few
    assert torch.allclose(first.samples, expected.expand_as(first.samples), atol=1e-5)
    assert torch.equal(first.samples, second.samples)
    assert first.reward == pytest.approx(0.45, abs=1e-5)
    assert first.judge == pytest.approx(4.5)


@pytest.mark.parametrize("name", list(LABELS))
def test_a_run_counts_what_its_plan_says(tiny, name):
    seen = []
    outcome = train(name, 0, tiny, lambda done, total: seen.append(done / total))
    cost, run = count(demo_method(name)), outcome.run
    prompts = sum(map(len, prompt_schedule(demo_method(name), tiny.tuning[name], tiny.calls)))
    assert run.rollout_calls == prompts * cost.denoiser_calls
    assert run.update_calls == prompts * cost.trained_parents
    assert run.updates == run.iterations * (8 if name == "g2rpo" else 1)
    assert [point.calls for point in run.curve][0::2] == [0, run.calls]
    assert len(run.curve) == 3
    assert seen[-1] == 1.0
    assert outcome.before.shape == outcome.after.shape == (3, 10, 8, 8)
    assert not (outcome.before == outcome.after).all()
    nodes = [len(level) for level in outcome.tree.states]
    assert nodes[0] == 1
    assert nodes[-1] == len(outcome.tree.rewards)
    assert sum(int(level.sum()) for level in outcome.tree.trained) == (12 if name == "g2rpo" else cost.trained_edges)


def test_a_run_is_a_function_of_its_seed(tiny):
    config = replace(tiny, calls=612, evaluations=1)
    first, again, other = (train("branchgrpo", seed, config, lambda *_: None) for seed in (0, 0, 1))
    rewards = [[point.reward for point in outcome.run.curve] for outcome in (first, again, other)]
    assert rewards[0] == rewards[1]
    assert rewards[0][0] == rewards[2][0]
    assert rewards[0][-1] != rewards[2][-1]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_pool_keeps_order_and_passes_progress_and_errors_on(workers):
    threads, seen = torch.get_num_threads(), []
    with Pool(workers) as pool:
        tasks = [Task(str(i), double, (i,)) for i in range(4)]
        assert pool.run(tasks, lambda *message: seen.append(message)) == [(2 * i, 1) for i in range(4)]
        assert sorted(seen) == [(str(i), 1, 1) for i in range(4)]
        with pytest.raises(OptionError, match="number = -1"):
            pool.run([Task("bad", double, (-1,))], lambda *_: None)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_s_messages_arrive_before_its_result(workers):
    seen = []
    with Pool(workers) as pool:
        pool.run([Task("a", say_slowly, ())], lambda *message: seen.append(message))
        assert seen == [("a", 1, 1)]


def test_options_are_checked():
    for bad in ({"seeds": 0}, {"calls": 0}, {"samples": 0}, {"workers": 0}, {"tuning": {}}):
        with pytest.raises(OptionError, match=rf"demo\.{next(iter(bad))}"):
            DemoConfig(**bad)
    with pytest.raises(OptionError, match=r"tuning\.learning_rate = 0"):
        Tuning(0.0)
    with pytest.raises(OptionError, match=r"tuning\.prompts = 11"):
        Tuning(1e-4, prompts=11)
