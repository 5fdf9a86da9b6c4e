"""A tree rollout, its rewards on decoded samples and one update, on every backbone, end to end."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_models import KINDS, NEGATIVE, PROMPTS, QUICK, ROWS, first_frames, saved
from helpers_rewards import tiny_clip_folder

from branchgrpo.conformance.adapters.optimized import OptimizedImplementation
from branchgrpo.conformance.adapters.reference import ReferenceImplementation
from branchgrpo.models.auto import load_backbone
from branchgrpo.models.backbone import Backbone
from branchgrpo.models.condition import EncodedCondition
from branchgrpo.models.lora import LoraOptions
from branchgrpo.models.options import LoadOptions
from branchgrpo.optimized.fusion import fuse
from branchgrpo.optimized.normalization import normalize
from branchgrpo.optimized.pruning import Masks, leaf_keys, prune
from branchgrpo.optimized.reward import score
from branchgrpo.optimized.rollout import rollout
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.optimized.singular import multi_granularity_advantages, singular_rollout
from branchgrpo.optimized.tree import Levels, Tree
from branchgrpo.optimized.update import accumulate_gradients, objective
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import Method
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import ExtremeB, Normalization, Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.presets import branchgrpo, g2rpo
from branchgrpo.reference.protocols import Prompt, RewardModel
from branchgrpo.rewards.clip_rewards import ClipScore
from branchgrpo.rewards.decoded import DecodedReward

AGREE = [k if k == "flux" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
BRANCH = branchgrpo("tiny", steps=4, splits=(0, 2), branching=2, pruning=(ExtremeB(1),))
GRANULAR = g2rpo("tiny", steps=4, group=3, granularities=(1, 2))
ASKED = [Prompt(5, PROMPTS[0]), Prompt(2, PROMPTS[1])]
ROUNDING = 1e-11  # of the norm: float64 over the calls of a path, on networks that amplify an error a few times a call


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture(scope="module")
def reward(root: Path) -> RewardModel:
    """A real CLIP score on a tiny random CLIP."""
    return ClipScore.load(tiny_clip_folder(root)[0])


def loaded(kind: str, root: Path, dtype: torch.dtype) -> tuple[Backbone, EncodedCondition, tuple[int, ...]]:
    """A backbone with an adapter that is not zero, so that every part of it has a gradient."""
    guidance, size = ROWS[kind].guidance, ROWS[kind].size
    options = LoadOptions(max_sequence_length=16)
    lora = LoraOptions(rank=2, alpha=4)
    model = load_backbone(saved(kind, root), dtype=dtype, guidance=guidance, lora=lora, options=options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.trainable_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    condition = model.encode([p.text for p in ASKED], negative=NEGATIVE, **first_frames(kind, size, 2))
    return model, condition, model.latent_shape(size[1], size[2], size[0])


class OnDecoded:
    """The reward of what the VAE makes of a leaf; of a video its last frame."""

    def __init__(self, model: Backbone, reward: RewardModel) -> None:
        def decode(latents: torch.Tensor) -> torch.Tensor:
            samples = model.decode(latents)
            return samples[:, -1] if samples.ndim == 5 else samples

        self.inner = DecodedReward(reward, decode, chunk=5)
        self.name, self.version, self.range = reward.name, reward.version, reward.range

    def __call__(self, samples: torch.Tensor, prompts: Sequence[Prompt]) -> torch.Tensor:
        return self.inner(samples, prompts)


def branch_parts(
    model: Backbone, condition: EncodedCondition, shape: tuple[int, ...], reward: RewardModel
) -> tuple[list[Tree], list[Levels], list[Masks]]:
    """Trees, advantages and kept edges of BranchGRPO."""
    plan = BRANCH.plan_at(0)
    assert isinstance(plan, Plan)
    sampling = Sampling(KeyedNoise(3), shape, torch.float32, torch.float32, BRANCH.log_prob, chunk=3)
    tree = rollout(plan, model, ASKED, condition, sampling)
    rewards = score(tree, [reward])
    assert rewards.shape == (2, 4, 1)
    assert (rewards.std(dim=1) > 0).all()
    values = fuse(tree, rewards, BRANCH.fusion)
    advantages = normalize(plan, values, [1.0], BRANCH.normalization)
    kept = prune(plan, leaf_keys(plan, values, [1.0], BRANCH.normalization), BRANCH.pruning, 0)
    return [tree], [advantages], [kept]


def granular_parts(
    model: Backbone, condition: EncodedCondition, shape: tuple[int, ...], reward: RewardModel
) -> tuple[list[Tree], list[Levels], list[Masks]]:
    """Trees, advantages and kept edges of G²RPO: one member (k, λ₀) a k."""
    family = GRANULAR.plan_at(0)
    assert isinstance(family, PlanFamily)
    sampling = Sampling(KeyedNoise(3), shape, torch.float32, torch.float32, GRANULAR.log_prob, chunk=4)
    trees = singular_rollout(family, model, ASKED, condition, sampling)
    values = {member: fuse(tree, score(tree, [reward]), GRANULAR.fusion) for member, tree in trees.items()}
    chosen = [trees[k, family.granularities[0]] for k in family.ks]
    advantages = []
    for k in family.ks:
        mine = {granularity: values[k, granularity] for granularity in family.granularities}
        advantages.append(multi_granularity_advantages(family, k, mine, [1.0], Normalization()))
    kept = [
        tuple(torch.ones(2, tree.plan.roots * n, dtype=torch.bool) for n in tree.plan.level_sizes[1:])
        for tree in chosen
    ]
    return chosen, advantages, kept


METHODS = [(BRANCH, branch_parts), (GRANULAR, granular_parts)]


@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.parametrize(("method", "parts"), METHODS, ids=["branch", "g2"])
def test_one_update_raises_the_objective_and_moves_the_adapter_only(
    method: Method, parts: object, kind: str, root: Path, reward: RewardModel
) -> None:
    model, condition, shape = loaded(kind, root, torch.float32)
    before = {name: p.detach().clone() for name, p in model.state_dict().items()}
    trees, advantages, kept = parts(model, condition, shape, OnDecoded(model, reward))
    wide = replace(method.objective, clip_low=0.5, clip_high=0.5)  # so that a step of the optimiser is not clipped away
    stats = accumulate_gradients(trees, model, condition, advantages, kept, wide, micro_batch=3)
    assert stats.edges >= 8
    assert stats.batches > 1
    # on policy the ratio is 1 up to float32 velocities of other batches, divided by the smallest std of a step
    assert max(abs(stats.ratio_min - 1), abs(stats.ratio_max - 1)) < 1e-3
    asked = trained_experts(model, trees)
    gradients = [p.grad for name, p in model.trainable_parameters() if name.startswith(asked)]
    assert all(g is not None and torch.isfinite(g).all() and torch.count_nonzero(g) for g in gradients)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    torch.optim.SGD([p for _, p in model.trainable_parameters()], lr=step_length(gradients)).step()
    with torch.no_grad():
        assert float(objective(trees, model, condition, advantages, kept, wide)) > stats.objective
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != ("lora_" in name and name.startswith(asked)), name


def trained_experts(model: Backbone, trees: Sequence[Tree]) -> tuple[str, ...]:
    """Prefixes of the experts that see a trained noise level: the levels that G²RPO trains are high."""
    levels = [tree.plan.sigmas[i] for tree in trees for i in tree.plan.trainable_steps]
    if len(model.experts) == 1:
        return ("transformer.",)
    high, low = ("transformer.", any(s >= 0.875 for s in levels)), ("transformer_2.", any(s < 0.875 for s in levels))
    return tuple(name for name, asked in (high, low) if asked)


def step_length(gradients: Sequence[torch.Tensor | None]) -> float:
    """A small step: its length is 1e-3 in parameter space, about a hundredth of the adapter."""
    return 1e-3 / float(torch.cat([g.flatten() for g in gradients if g is not None]).norm())


@pytest.mark.parametrize("kind", AGREE)
def test_optimized_agrees_with_the_reference(kind: str, root: Path) -> None:
    """States, log-probabilities, objective, KL and gradient, in float64, with chunks that mix levels and prompts."""
    model, condition, shape = loaded(kind, root, torch.float64)
    plan = BRANCH.plan_at(0)
    assert isinstance(plan, Plan)
    arguments = {
        "latent_shape": shape,
        "dtype": torch.float64,
        "storage_dtype": torch.float64,
        "reduction": BRANCH.log_prob,
        "iteration": 0,
    }
    pair = (ReferenceImplementation(), OptimizedImplementation(chunk=3))
    with torch.no_grad():
        traces = [i.rollout(plan, model, ASKED, condition, KeyedNoise(1), **arguments) for i in pair]
    for a, b in zip((*traces[0].states, *traces[0].means), (*traces[1].states, *traces[1].means), strict=True):
        assert (a - b).norm() <= ROUNDING * a.norm()
    values = pair[0].fuse(traces[0], linear_rewards(traces[0].states[-1]), BRANCH.fusion)
    advantages = pair[0].normalize(plan, values, [1.0], BRANCH.normalization)
    kept = pair[0].prune(plan, pair[0].leaf_keys(plan, values, [1.0], BRANCH.normalization), BRANCH.pruning, 0)
    options, found = Objective(clip_low=0.1, clip_high=0.1, kl=0.5), []
    for implementation in pair:
        model.zero_grad()
        value = implementation.objective(
            [traces[0]], model, condition, [advantages], [kept], options, BRANCH.log_prob, model.reference()
        )
        value.backward()
        found.append(torch.cat([p.grad.flatten() for _, p in model.trainable_parameters()] + [value.detach().view(1)]))
    assert torch.count_nonzero(found[0]) > 0.9 * found[0].numel()
    assert (found[0] - found[1]).norm() <= ROUNDING * found[0].norm()


def linear_rewards(leaves: torch.Tensor) -> torch.Tensor:
    """Rewards in latent space, ``[prompts, leaves, 1]``."""
    flat = leaves.double().flatten(2)
    return (flat @ torch.linspace(-1, 1, flat.shape[-1], dtype=torch.float64)).unsqueeze(-1)
