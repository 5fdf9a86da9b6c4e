"""Accumulated gradients: any micro-batch, order and accumulation gives the gradient of the whole objective."""

from functools import cache

import pytest
import torch
from helpers_optimized import (
    LATENT,
    SmallModel,
    accumulated,
    close,
    condition_of,
    gradients,
    preset_plan,
    prompts_of,
    rewards_of,
)

from branchgrpo.optimized.fusion import fuse
from branchgrpo.optimized.normalization import normalize
from branchgrpo.optimized.pruning import Masks, leaf_keys, prune
from branchgrpo.optimized.rollout import rollout
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.optimized.singular import multi_granularity_advantages, singular_rollout
from branchgrpo.optimized.tree import Levels, Tree
from branchgrpo.optimized.update import accumulate_gradients, objective
from branchgrpo.reference.counts import count
from branchgrpo.reference.errors import InputError, ModelError, OptionError, PlanError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import Fusion, Normalization, Objective, ParentTop1
from branchgrpo.reference.presets import preset

WIDE = Objective(clip_low=0.2, clip_high=0.2)


@cache
def grown(name: str = "branchgrpo-widpru", prompts: int = 2) -> tuple[Tree, Levels, Masks]:
    plan = preset_plan(name)
    sampling = Sampling(KeyedNoise(4), LATENT)
    tree = rollout(plan, SmallModel(1), prompts_of(prompts), condition_of(prompts), sampling)
    values = fuse(tree, rewards_of(plan, prompts, 1, 6), Fusion())
    advantages = normalize(plan, values, [1.0], Normalization())
    keys = leaf_keys(plan, values, [1.0], Normalization())
    return tree, advantages, prune(plan, keys, preset(name).pruning, 0)


def moved_model() -> SmallModel:
    model = SmallModel(1)
    with torch.no_grad():
        model.weight.mul_(1.05)
    return model


@pytest.mark.parametrize("micro_batch", [1, 7, 64, 1000, None])
def test_gradients_of_all_micro_batch_sizes_equal_the_whole(micro_batch: int | None) -> None:
    tree, advantages, kept = grown()
    model, condition = moved_model(), condition_of(2)
    whole = objective([tree], model, condition, [advantages], [kept], WIDE)
    expected = -gradients(model, whole)
    model.calls.clear()
    stats = accumulate_gradients([tree], model, condition, [advantages], [kept], WIDE, micro_batch=micro_batch)
    assert close(accumulated(model), expected)
    assert stats.objective == pytest.approx(whole.item(), rel=1e-9)
    assert stats.loss == -stats.objective
    counts = count(preset("branchgrpo-widpru"))
    assert (stats.edges, stats.parents) == (2 * counts.trained_edges, 2 * counts.trained_parents)
    assert sum(model.calls) == stats.parents
    assert max(model.calls) <= (micro_batch or stats.parents)


def test_prompt_order_and_split_accumulation_change_no_gradient() -> None:
    tree, advantages, kept = grown()
    model, condition = moved_model(), condition_of(2)
    expected = -gradients(model, objective([tree], model, condition, [advantages], [kept], WIDE))
    back = torch.tensor([1, 0])
    turned = Tree(
        tree.plan,
        tree.prompts[::-1],
        tuple(s[back] for s in tree.states),
        tuple(None if lp is None else lp[back] for lp in tree.log_probs),
        tree.dtype,
        tree.device,
        tree.reduction,
    )
    levels, masks = tuple(a[back] for a in advantages), tuple(m[back] for m in kept)
    accumulate_gradients([turned], model, condition.gather(back), [levels], [masks], WIDE, micro_batch=9)
    assert close(accumulated(model), expected)
    model.zero_grad()
    for row in (0, 1):
        one = torch.tensor([row])
        part = Tree(
            tree.plan,
            (tree.prompts[row],),
            tuple(s[one] for s in tree.states),
            tuple(None if lp is None else lp[one] for lp in tree.log_probs),
            tree.dtype,
            tree.device,
            tree.reduction,
        )
        levels, masks = tuple(a[one] for a in advantages), tuple(m[one] for m in kept)
        accumulate_gradients([part], model, condition.gather(one), [levels], [masks], WIDE, total_trees=2)
    assert close(accumulated(model), expected)


def test_on_policy_ratios_are_1_and_inner_epochs_keep_the_old_log_probabilities() -> None:
    tree, advantages, kept = grown()
    old = [None if lp is None else lp.clone() for lp in tree.log_probs]
    model, condition = SmallModel(1), condition_of(2)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    first = accumulate_gradients([tree], model, condition, [advantages], [kept], WIDE, micro_batch=16)
    # Another batch size moves a float64 velocity by some 1e-15; std ≥ 0.02 and six elements amplify it 10³ times.
    assert abs(first.ratio_max - 1.0) < 1e-11
    assert abs(first.ratio_min - 1.0) < 1e-11
    assert first.clip_fraction == 0.0
    optimiser.step()
    optimiser.zero_grad()
    second = accumulate_gradients([tree], model, condition, [advantages], [kept], WIDE, micro_batch=16)
    assert second.ratio_max > 1.0 + 1e-6
    assert second.objective > first.objective
    assert all(a is b or torch.equal(a, b) for a, b in zip(tree.log_probs, old, strict=True))  # type: ignore[arg-type]


def test_kl_to_a_frozen_reference_enters_the_gradient() -> None:
    tree, advantages, kept = grown()
    model, frozen, condition = moved_model(), SmallModel(1), condition_of(2)
    options = Objective(clip_low=0.2, clip_high=0.2, kl=0.5)
    arguments = ([tree], model, condition, [advantages], [kept], options)
    expected = -gradients(model, objective(*arguments, reference_model=frozen))
    stats = accumulate_gradients(*arguments, micro_batch=10, reference_model=frozen)
    assert close(accumulated(model), expected)
    assert stats.kl > 0.0
    model.zero_grad()
    plain = accumulate_gradients([tree], model, condition, [advantages], [kept], WIDE, micro_batch=10)
    assert plain.objective - 0.5 * stats.kl == pytest.approx(stats.objective, abs=1e-12)
    assert all(p.grad is None for p in frozen.parameters())


def test_a_family_is_updated_over_all_k_or_one_k_at_a_time() -> None:
    method, family = preset("g2rpo-10"), preset("g2rpo-10").sampler
    assert isinstance(family, PlanFamily)
    condition = condition_of(2)
    trees = singular_rollout(family, SmallModel(1), prompts_of(2), condition, Sampling(KeyedNoise(4), LATENT))
    members, levels, masks = [], [], []
    for k in family.ks:
        values = {
            g: fuse(trees[k, g], rewards_of(family.member(k, g), 2, 1, 10 * k + g), Fusion())
            for g in family.granularities
        }
        members.append(trees[k, family.granularities[0]])
        levels.append(multi_granularity_advantages(family, k, values, [1.0], method.normalization))
        masks.append(prune(members[-1].plan, torch.zeros(2, family.group, dtype=torch.float64), [], 0))
    model = moved_model()
    expected = -gradients(model, objective(members, model, condition, levels, masks, WIDE))
    model.calls.clear()
    stats = accumulate_gradients(members, model, condition, levels, masks, WIDE, micro_batch=3)
    assert close(accumulated(model), expected)
    assert (stats.edges, stats.parents) == (2 * count(method).trained_edges, 2 * count(method).trained_parents)
    assert sum(model.calls) == stats.parents
    model.zero_grad()
    for one in zip(members, levels, masks, strict=True):
        accumulate_gradients([one[0]], model, condition, [one[1]], [one[2]], WIDE)
    assert close(accumulated(model) / len(members), expected)


def test_pruned_gradient_is_the_kept_edges_share_of_the_full_one() -> None:
    tree, advantages, _ = grown()
    full = tuple(torch.ones_like(a, dtype=torch.bool) for a in advantages[1:])
    keys = leaf_keys(tree.plan, tuple(a.unsqueeze(-1) for a in advantages), [1.0], Normalization())
    kept = prune(tree.plan, keys, [ParentTop1()], 0)
    dropped = tuple(~mask for mask in kept)
    model, condition = moved_model(), condition_of(2)
    sizes = [sum(int(m[step][0].sum()) for step in tree.plan.trainable_steps) for m in (full, kept, dropped)]
    parts = [
        gradients(model, objective([tree], model, condition, [advantages], [m], WIDE)) for m in (full, kept, dropped)
    ]
    assert close(sizes[1] * parts[1] + sizes[2] * parts[2], sizes[0] * parts[0])


def test_wrong_input_is_refused_before_the_first_forward() -> None:
    tree, advantages, kept = grown()
    model, condition = SmallModel(1), condition_of(2)
    model.calls.clear()
    none = tuple(torch.zeros_like(mask) for mask in kept)
    with pytest.raises(PlanError, match="trained edges = 0: must be at least one a tree"):
        accumulate_gradients([tree], model, condition, [advantages], [none], WIDE)
    with pytest.raises(InputError, match=r"reference_model = None: must be given if and only if objective\.kl > 0"):
        accumulate_gradients([tree], model, condition, [advantages], [kept], Objective(kl=0.1))
    with pytest.raises(InputError, match=r"len\(condition\) = 3"):
        accumulate_gradients([tree], model, condition_of(3), [advantages], [kept], WIDE)
    with pytest.raises(InputError, match="advantages"):
        accumulate_gradients([tree], model, condition, [advantages[:-1]], [kept], WIDE)
    with pytest.raises(InputError, match="kept: nodes"):
        accumulate_gradients([tree], model, condition, [advantages], [kept[:-1]], WIDE)
    with pytest.raises(OptionError, match="micro_batch = 0: must be None or an integer ≥ 1"):
        accumulate_gradients([tree], model, condition, [advantages], [kept], WIDE, micro_batch=0)
    assert model.calls == []


def test_a_non_finite_velocity_in_the_update_is_named() -> None:
    tree, advantages, kept = grown()
    model = SmallModel(1)
    with torch.no_grad():
        model.bias[0] = float("nan")
    with pytest.raises(ModelError, match="velocity at step 0, node 0 of prompt 5 = 'NaN or ±inf': must be finite"):
        accumulate_gradients([tree], model, condition_of(2), [advantages], [kept], WIDE, micro_batch=16)


def test_a_model_without_anything_to_train_is_refused() -> None:
    tree, advantages, kept = grown()
    model = moved_model().requires_grad_(False)
    with pytest.raises(ModelError, match="velocity: requires_grad = False: must be True"):
        accumulate_gradients([tree], model, condition_of(2), [advantages], [kept], WIDE)
