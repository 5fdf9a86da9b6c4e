"""One iteration of any method: rollout, rewards, fusion, normalization, pruning, then the optimiser's steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from branchgrpo.optimized.fusion import fuse
from branchgrpo.optimized.normalization import normalize
from branchgrpo.optimized.pruning import Masks, leaf_keys, prune
from branchgrpo.optimized.reward import score
from branchgrpo.optimized.rollout import rollout
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.optimized.singular import multi_granularity_advantages, singular_rollout
from branchgrpo.optimized.tree import Levels, Tree
from branchgrpo.optimized.update import UpdateStats, accumulate_gradients
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import Method
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, Prompt, RewardModel, VelocityModel

WEIGHTS = (1.0,)
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True, eq=False)
class Batch:
    """Trees for one step of the optimiser, with the advantages of their nodes and the edges that pruning left."""

    tree: Tree
    rewards: torch.Tensor
    advantages: Levels
    kept: Masks


def tree_batch(method: Method, plan: Plan, tree: Tree, reward: RewardModel, iteration: int) -> Batch:
    """Reward, fuse, normalise and prune the trees of one plan (FUSE-1, NORM-1, PRUNE-1)."""
    rewards = score(tree, [reward])
    values = fuse(tree, rewards, method.fusion)
    keys = leaf_keys(plan, values, WEIGHTS, method.normalization)
    advantages = normalize(plan, values, WEIGHTS, method.normalization)
    return Batch(tree, rewards, advantages, prune(plan, keys, method.pruning, iteration))


def family_batches(
    method: Method,
    family: PlanFamily,
    model: VelocityModel,
    prompts: Sequence[Prompt],
    condition: Condition,
    sampling: Sampling,
    reward: RewardModel,
) -> list[Batch]:
    """One batch for each perturbed step k, its advantages summed over the granularities (SING-1, GRAN-4)."""
    trees = singular_rollout(family, model, prompts, condition, sampling)
    rewards = {member: score(tree, [reward]) for member, tree in trees.items()}
    values = {member: fuse(tree, rewards[member], method.fusion) for member, tree in trees.items()}
    batches = []
    for k in family.ks:
        member = (k, family.granularities[0])
        by_granularity = {granularity: values[k, granularity] for granularity in family.granularities}
        advantages = multi_granularity_advantages(family, k, by_granularity, WEIGHTS, method.normalization)
        plan = trees[member].plan
        kept = prune(plan, leaf_keys(plan, values[member], WEIGHTS, method.normalization), (), sampling.iteration)
        batches.append(Batch(trees[member], rewards[member], advantages, kept))
    return batches


def collect(
    method: Method,
    model: VelocityModel,
    prompts: Sequence[Prompt],
    condition: Condition,
    sampling: Sampling,
    reward: RewardModel,
) -> list[Batch]:
    """Roll out one iteration of a method; a plan gives one batch, a plan family one for each k.

    Args:
        method: what to sample and how to turn rewards into advantages.
        model: the policy.
        prompts, condition: of the iteration.
        sampling: noise and dtypes; its iteration moves windows.
        reward: the one reward model.
    """
    plan = method.plan_at(sampling.iteration)
    if isinstance(plan, PlanFamily):
        return family_batches(method, plan, model, prompts, condition, sampling, reward)
    tree = rollout(plan, model, prompts, condition, sampling)
    return [tree_batch(method, plan, tree, reward, sampling.iteration)]


def improve(
    method: Method,
    batches: Sequence[Batch],
    model: VelocityModel,
    condition: Condition,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> list[UpdateStats]:
    """One optimiser step a batch: G²RPO's public code, too, steps once a k (OBJ-1, DIV-G5)."""
    stats = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        found = accumulate_gradients([batch.tree], model, condition, [batch.advantages], [batch.kept], method.objective)
        nn.utils.clip_grad_norm_(network.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        stats.append(found)
    return stats
