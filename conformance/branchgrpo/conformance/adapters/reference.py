"""The reference behind the implementation protocol: one tree, one node at a time, arrays at the border."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.conformance.adapters.trees import bare_trees, from_levels, to_levels, to_trace, to_trees
from branchgrpo.reference import fusion, kernels, noise, normalization, objective, pruning, rollout, singular
from branchgrpo.reference.errors import InputError, RewardError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.implementation import CAPABILITIES, Levels, Masks, Trace
from branchgrpo.reference.log_probability import gaussian_log_density
from branchgrpo.reference.options import Fusion, Normalization, Objective, PruningRule
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, NoiseSource, Prompt, VelocityModel
from branchgrpo.reference.subsets import trained_subset
from branchgrpo.reference.tree import Node, Tree
from branchgrpo.reference.types import Reduction


def row(condition: Condition, index: int) -> Condition:
    """One item of a batch of conditions."""
    return condition.gather(torch.tensor([index]))


def check_conditions(condition: Condition, prompts: Sequence[Prompt]) -> None:
    """Refuse a batch of conditions that is not one a prompt.  Clause: ERR-3, OBJ-8.

    Raises:
        InputError: another number of items.
    """
    if len(condition) != len(prompts):
        raise InputError("len(condition)", len(condition), f"{len(prompts)}, one item a prompt")


def kept_nodes(trees: Sequence[Tree], kept: Masks) -> set[Node]:
    """The edges that masks keep, each named by the child it ends in."""
    return {
        node
        for depth, mask in enumerate(kept, start=1)
        for node, stays in zip(
            (node for tree in trees for node in tree.level(depth)), mask.flatten().tolist(), strict=True
        )
        if stays
    }


def masks_of(trees: Sequence[Tree], prompts: int, kept: set[Node], steps: int) -> Masks:
    """Masks of a set of edges, entry d − 1 for child depth d."""
    return tuple(
        torch.tensor([node in kept for tree in trees for node in tree.level(depth)]).reshape(prompts, -1)
        for depth in range(1, steps + 1)
    )


class ReferenceImplementation:
    """``branchgrpo.reference`` as an ``Implementation``.

    Attributes:
        device: where the arithmetic of a rollout is done.
    """

    name = "branchgrpo.reference"
    spec_version = "1.0"
    capabilities = CAPABILITIES
    device = torch.device("cpu")

    def transition(
        self, plan: Plan, step: int, x: Float[Tensor, "items *latent"], velocity: Float[Tensor, "items *latent"]
    ) -> tuple[Float[Tensor, "items *latent"], float]:
        """Mean and std of step ``step``, item by item."""
        pairs = [kernels.transition(plan, step, a, v) for a, v in zip(x, velocity, strict=True)]
        return torch.stack([mean for mean, _ in pairs]), pairs[0][1]

    def branch_noise(
        self, shared: Float[Tensor, "parents *latent"], private: Float[Tensor, "parents K *latent"], spread: float
    ) -> Float[Tensor, "parents K *latent"]:
        """ξ_b = a·ξ₀ + c·η_b, child by child."""
        pairs = zip(shared, private, strict=True)
        return torch.stack([torch.stack([noise.branch_noise(s, eta, spread) for eta in own]) for s, own in pairs])

    def log_probability(
        self,
        child: Float[Tensor, "items *latent"],
        mean: Float[Tensor, "items *latent"],
        std: float,
        reduction: Reduction,
    ) -> Float64[Tensor, "items"]:
        """Log N(child; mean, std²), item by item."""
        pairs = zip(child, mean, strict=True)
        return torch.stack([gaussian_log_density(x, mu, std, reduction) for x, mu in pairs])

    def rollout(
        self,
        plan: Plan,
        model: VelocityModel,
        prompts: Sequence[Prompt],
        condition: Condition,
        noise: NoiseSource,
        *,
        latent_shape: Sequence[int],
        dtype: torch.dtype,
        storage_dtype: torch.dtype,
        reduction: Reduction,
        iteration: int,
    ) -> Trace:
        """Grow every prompt's trees, prompt by prompt."""
        check_conditions(condition, prompts)
        sampling = rollout.Sampling(noise, tuple(latent_shape), dtype, storage_dtype, reduction, iteration, self.device)
        trees = [
            tree
            for i, prompt in enumerate(prompts)
            for tree in rollout.rollout(plan, model, prompt, row(condition, i), sampling)
        ]
        return to_trace(plan, prompts, trees)

    def fuse(self, trace: Trace, rewards: Float64[Tensor, "prompts leaves models"], options: Fusion) -> Levels:
        """Node values, tree by tree."""
        trees, count = to_trees(trace), len(trace.prompts)
        leaves = [leaf for tree in trees for leaf in tree.root.leaves()]
        if rewards.shape[:2] != trace.states[-1].shape[:2]:
            raise RewardError(
                "rewards: shape", tuple(rewards.shape), f"{tuple(trace.states[-1].shape[:2])}, one a leaf"
            )
        by_leaf = dict(zip(leaves, rewards.cpu().flatten(0, 1).unbind(0), strict=True))
        values: dict[Node, Tensor] = {}
        for tree in trees:
            mine = {leaf: by_leaf[leaf] for leaf in tree.root.leaves()}
            values |= fusion.fuse(tree, mine, options)
        return to_levels(trees, count, values, trace.plan.steps)

    def normalize(self, plan: Plan, values: Levels, weights: Sequence[float], options: Normalization) -> Levels:
        """Advantages of all trees."""
        trees = bare_trees(plan, len(values[0]))
        advantages = normalization.normalize(trees, from_levels(trees, values), weights, options)
        return to_levels(trees, len(values[0]), advantages, plan.steps)

    def leaf_keys(
        self, plan: Plan, values: Levels, weights: Sequence[float], options: Normalization
    ) -> Float64[Tensor, "prompts leaves"]:
        """Keys of all leaves."""
        trees = bare_trees(plan, len(values[0]))
        keys = pruning.leaf_keys(trees, from_levels(trees, values), weights, options)
        flat = [keys[leaf] for tree in trees for leaf in tree.root.leaves()]
        return torch.tensor(flat, dtype=torch.float64).reshape(len(values[0]), -1)

    def prune(
        self, plan: Plan, keys: Float64[Tensor, "prompts leaves"], rules: Sequence[PruningRule], iteration: int
    ) -> Masks:
        """Edges that stay."""
        trees = bare_trees(plan, len(keys))
        leaves = [leaf for tree in trees for leaf in tree.root.leaves()]
        by_leaf = dict(zip(leaves, keys.flatten().tolist(), strict=True))
        kept = pruning.prune(trees, by_leaf, rules, iteration)
        return masks_of(trees, len(keys), kept, plan.steps)

    def trained_subsets(self, plan: Plan, prompts: Sequence[Prompt], seed: int, iteration: int) -> Masks:
        """All edges but those of trainable steps that are in the subset of none of their chains."""
        free = set(range(plan.steps)).difference(plan.trainable_steps)
        trees = bare_trees(plan, len(prompts))
        kept: set[Node] = set()
        for i, tree in enumerate(trees):
            prompt = prompts[i // plan.roots].id
            for leaf in tree.root.leaves():
                steps = trained_subset(plan, seed, iteration, prompt, tree.root_index, leaf.index)
                node: Node | None = leaf
                while node is not None:
                    if node.depth - 1 in free | steps:
                        kept.add(node)
                    node = node.parent
        return masks_of(trees, len(prompts), kept, plan.steps)

    def objective(
        self,
        traces: Sequence[Trace],
        model: VelocityModel,
        condition: Condition,
        advantages: Sequence[Levels],
        kept: Sequence[Masks],
        options: Objective,
        reduction: Reduction,
        reference_model: VelocityModel | None,
    ) -> Float64[Tensor, ""]:
        """J over the trees of all traces."""
        check_conditions(condition, traces[0].prompts)
        trees: list[Tree] = []
        conditions: list[Condition] = []
        values: dict[Node, Tensor] = {}
        stays: set[Node] = set()
        for trace, levels, masks in zip(traces, advantages, kept, strict=True):
            mine = to_trees(trace)
            trees += mine
            conditions += [row(condition, i // trace.plan.roots) for i in range(len(mine))]
            values |= from_levels(mine, levels)
            stays |= kept_nodes(mine, masks)
        return objective.objective(trees, model, conditions, values, stays, options, reduction, reference_model)

    def singular_rollout(
        self,
        family: PlanFamily,
        model: VelocityModel,
        prompts: Sequence[Prompt],
        condition: Condition,
        noise: NoiseSource,
        *,
        latent_shape: Sequence[int],
        dtype: torch.dtype,
        storage_dtype: torch.dtype,
        reduction: Reduction,
        iteration: int,
    ) -> dict[tuple[int, int], Trace]:
        """Every member (k, λ), equal inputs called once."""
        check_conditions(condition, prompts)
        sampling = rollout.Sampling(noise, tuple(latent_shape), dtype, storage_dtype, reduction, iteration, self.device)
        grown = [
            singular.singular_rollout(family, model, prompt, row(condition, i), sampling)
            for i, prompt in enumerate(prompts)
        ]
        return {
            member: to_trace(family.member(*member), prompts, [tree for own in grown for tree in own[member]])
            for member in family.members()
        }

    def granular_advantages(
        self,
        family: PlanFamily,
        k: int,
        values: Mapping[int, Levels],
        weights: Sequence[float],
        options: Normalization,
    ) -> Float64[Tensor, "prompts children"]:
        """Multi-granularity advantages of step k's children."""
        first = family.granularities[0]
        count = len(values[first][0])
        trees = {(k, g): bare_trees(family.member(k, g), count) for g in family.granularities}
        by_node: dict[Node, Tensor] = {}
        for granularity in family.granularities:
            by_node |= from_levels(trees[k, granularity], values[granularity])
        found = singular.multi_granularity_advantages(family, k, trees, by_node, weights, options)
        flat = [found[child] for tree in trees[k, first] for child in tree.level(k + 1)]
        return torch.stack(flat).reshape(count, -1)
