"""Plain fusion, normalization, pruning and objective, each decision a method."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from branchgrpo.conformance.mutants.plain_rollout import PlainRollout
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.implementation import Levels, Masks, Trace
from branchgrpo.reference.options import DepthWindow, ExtremeB, Fusion, Normalization, PruningRule
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Prompt

Level = Float64[Tensor, "prompts nodes"]
SUBSET_ROLE = 3
"""Code of the role SUBSET in a key (NOISE-4)."""


class PlainTail(PlainRollout):
    """Everything between the rollout and the loss, on the CPU."""

    def path_scores(self, trace: Trace, depth: int) -> Float64[Tensor, "prompts nodes under"]:
        """log p(ℓ | n) for the leaves under every node of a depth."""
        leaves = trace.states[-1].shape[1]
        total = torch.zeros(len(trace.prompts), leaves, dtype=torch.float64)
        for level in trace.log_probs[depth:]:
            if level is not None:
                total = total + level.cpu().repeat_interleave(leaves // level.shape[1], dim=1)
        return total.reshape(len(trace.prompts), trace.states[depth].shape[1], -1)

    def child_weights(self, trace: Trace, depth: int, beta: float) -> Float64[Tensor, "prompts nodes under"]:
        """Products of softmaxes over siblings."""
        p, nodes = len(trace.prompts), trace.states[depth].shape[1]
        weights = torch.ones(p, nodes, 1, dtype=torch.float64)
        for below in range(depth, trace.plan.steps):
            k, level = trace.plan.branching[below], trace.log_probs[below]
            scores = torch.zeros(p, trace.states[below + 1].shape[1]) if level is None else level.cpu()
            own = self.sibling_softmax(beta * scores.double().reshape(p, -1, k)).reshape(p, nodes, -1)
            weights = weights.repeat_interleave(k, dim=2) * own
        return weights

    def sibling_softmax(self, scores: Float64[Tensor, "prompts parents K"]) -> Float64[Tensor, "prompts parents K"]:
        """Softmax over siblings."""
        return torch.softmax(scores, dim=-1)

    def standard(self, scores: Float64[Tensor, "prompts nodes under"]) -> Float64[Tensor, "prompts nodes under"]:
        """Scores standardised within a node's leaves."""
        spread = scores.std(dim=-1, correction=0, keepdim=True)
        width = scores.amax(dim=-1, keepdim=True) - scores.amin(dim=-1, keepdim=True)
        equal = width <= 2**-40 * scores.abs().amax(dim=-1, keepdim=True)
        return torch.where(equal, 0.0, (scores - scores.mean(dim=-1, keepdim=True)) / spread)

    def weights(self, trace: Trace, depth: int, options: Fusion) -> Float64[Tensor, "prompts nodes under"]:
        """Fusion weights of the leaves under every node of a depth."""
        if options.kind == "child_softmax":
            return self.child_weights(trace, depth, options.beta)
        scores = self.path_scores(trace, depth)
        return torch.softmax(
            options.beta * (self.standard(scores) if options.kind == "standardised" else scores), dim=-1
        )

    def fuse(self, trace: Trace, rewards: Float64[Tensor, "prompts leaves models"], options: Fusion) -> Levels:
        """Values of all nodes."""
        if rewards.shape[:2] != trace.states[-1].shape[:2] or not bool(torch.isfinite(rewards).all()):
            raise ValueError("rewards of another shape, or not finite")
        rewards, values = rewards.cpu(), []
        for depth in range(trace.plan.steps):
            below = rewards.reshape(len(trace.prompts), trace.states[depth].shape[1], -1, rewards.shape[2])
            values.append((self.weights(trace, depth, options).unsqueeze(-1) * below).sum(dim=2))
        return (*values, rewards)

    def is_equal(self, values: Float64[Tensor, "members"]) -> bool:
        """Values that count as equal."""
        return len(values) < 2 or bool(values.max() - values.min() <= 2**-40 * values.abs().max())

    def group_std(self, values: Float64[Tensor, "members"], options: Normalization) -> float:
        """Std of a group."""
        return float(values.std(correction=1 if options.bessel else 0))

    def groups(self, plan: Plan, level: Level, scope: str) -> list[Float64[Tensor, "members"]]:
        """For each tree the values of its group."""
        trees = level.reshape(-1, level.shape[1] // plan.roots)
        if scope == "tree":
            return list(trees)
        if scope == "prompt":
            return [row for row in level for _ in range(plan.roots)]
        return [level.flatten()] * len(trees)

    def z_scores(self, plan: Plan, level: Level, options: Normalization) -> Level:
        """Depth-wise scores of one reward."""
        trees = level.reshape(-1, level.shape[1] // plan.roots)
        means, stds = self.groups(plan, level, options.mean_scope), self.groups(plan, level, options.std_scope)
        rows = [
            torch.zeros_like(own)
            if self.is_equal(mean) or self.is_equal(std)
            else (own - mean.mean()) / (self.group_std(std, options) + options.eps)
            for own, mean, std in zip(trees, means, stds, strict=True)
        ]
        return torch.stack(rows).reshape(level.shape)

    def combined(
        self,
        plan: Plan,
        level: Float64[Tensor, "prompts nodes models"],
        weights: Sequence[float],
        options: Normalization,
    ) -> Level:
        """Weighted sum over reward models, before the clip."""
        if len(weights) != level.shape[2]:
            raise ValueError("one weight a reward model")
        level, w = level.cpu(), torch.tensor(list(weights), dtype=torch.float64)
        if options.order == "sum_then_normalize":
            return self.z_scores(plan, level @ w, options)
        return torch.stack([self.z_scores(plan, level[..., m], options) for m in range(len(w))], dim=-1) @ w

    def clip(self, advantages: Level, options: Normalization) -> Level:
        """The clip, once and last."""
        return advantages.clamp(-options.clip, options.clip)

    def normalize(self, plan: Plan, values: Levels, weights: Sequence[float], options: Normalization) -> Levels:
        """Advantages of all nodes."""
        return tuple(self.clip(self.combined(plan, level, weights, options), options) for level in values)

    def granular_advantages(
        self, family: PlanFamily, k: int, values: Mapping[int, Levels], weights: Sequence[float], options: Normalization
    ) -> Level:
        """Scores summed over granularities, clipped once."""
        parts = [self.combined(family.member(k, g), values[g][k + 1], weights, options) for g in family.granularities]
        return self.clip(torch.stack(parts).sum(dim=0), options)

    def leaf_keys(self, plan: Plan, values: Levels, weights: Sequence[float], options: Normalization) -> Level:
        """Keys of the leaves."""
        if len(weights) == 1:
            return values[-1][..., 0] * weights[0]
        return self.combined(plan, values[-1], weights, options)

    def ranked(self, keys: Float64[Tensor, "leaves"]) -> list[int]:
        """Leaves by descending key, then ascending index."""
        return sorted(range(len(keys)), key=lambda leaf: (-float(keys[leaf]), leaf))

    def best_child(self, keys: Float64[Tensor, "children"]) -> int:
        """The child that Parent-Top1 keeps."""
        return self.ranked(keys)[0]

    def extremes(self, keys: Float64[Tensor, "leaves"], b: int) -> set[int]:
        """The leaves that Extreme-b keeps."""
        order = self.ranked(keys)
        return {*order[:b], *order[-b:]}

    def stays(self, plan: Plan, rule: PruningRule, keys: Float64[Tensor, "leaves"]) -> set[int]:
        """The leaves of one tree that a width rule keeps."""
        if isinstance(rule, ExtremeB):
            return self.extremes(keys, rule.b)
        k = plan.branching[plan.splits[-1]]
        return {start + self.best_child(keys[start : start + k]) for start in range(0, len(keys), k)}

    def window(self, rule: DepthWindow, steps: int, iteration: int) -> range:
        """Child depths that a depth window drops."""
        stop = rule.stop if rule.stop is not None else (steps if rule.direction == 1 else 1)
        leading = rule.start + rule.size - 1 if rule.direction == 1 else rule.start
        first = rule.start + rule.direction * min(iteration // rule.period, rule.direction * (stop - leading))
        return range(max(first, 1), min(first + rule.size, steps + 1))

    def first_dropped(self, plan: Plan, drop_split_edges: bool) -> int:
        """Shallowest child depth at which a width rule drops."""
        return plan.splits[-1] + (1 if drop_split_edges else 2)

    def prune(self, plan: Plan, keys: Level, rules: Sequence[PruningRule], iteration: int) -> Masks:
        """Edges that stay."""
        masks = [torch.ones(keys.shape[0], plan.roots * size, dtype=torch.bool) for size in plan.level_sizes[1:]]
        for rule in rules:
            for depth, mask in enumerate(masks, start=1):
                if isinstance(rule, DepthWindow):
                    mask &= depth not in self.window(rule, plan.steps, iteration)
                elif not plan.splits:
                    raise ValueError("width pruning of a plan without a split")
                elif depth >= self.first_dropped(plan, rule.drop_split_edges):
                    trees = keys.reshape(-1, keys.shape[1] // plan.roots)
                    rows = [[leaf in self.stays(plan, rule, own) for leaf in range(len(own))] for own in trees]
                    mask &= torch.tensor(rows).reshape(mask.shape)
        return tuple(masks)

    def subset(self, plan: Plan, seed: int, iteration: int, prompt: int, root: int, leaf: int) -> set[int]:
        """Trained steps of one chain."""
        size = max(1, math.floor(plan.trained_fraction * len(plan.trainable_steps)))
        counter = np.array([0, prompt, SUBSET_ROLE << 56 | plan.steps << 32 | root, leaf], dtype=np.uint64)
        generator = np.random.Generator(
            np.random.Philox(key=np.array([seed, iteration], dtype=np.uint64), counter=counter)
        )
        return set(generator.choice(plan.trainable_steps, size=size, replace=False).tolist())

    def trained_subsets(self, plan: Plan, prompts: Sequence[Prompt], seed: int, iteration: int) -> Masks:
        """Edges that the chains' subsets let train."""
        chains = [
            self.subset(plan, seed, iteration, prompt.id, root, leaf)
            for prompt in prompts
            for root in range(plan.roots)
            for leaf in range(plan.leaves)
        ]
        return tuple(self.subset_mask(plan, len(prompts), chains, step) for step in range(plan.steps))

    def subset_mask(self, plan: Plan, prompts: int, chains: list[set[int]], step: int) -> Bool[Tensor, "prompts nodes"]:
        """Edges of one step whose chain trains it; steps whose edges belong to several chains are never trained."""
        size = plan.level_sizes[step + 1]
        if plan.trained_fraction == 1.0 or size < plan.leaves:
            return torch.full((prompts, plan.roots * size), plan.trained_fraction == 1.0)
        return torch.tensor([step in chain for chain in chains]).reshape(prompts, -1)
