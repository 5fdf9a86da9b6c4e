"""Wrapping a tree class that works node by node: growing, fusion, advantages, pruning."""

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.conformance.adapters.partial import PartialImplementation, own_operations, require, undefined
from branchgrpo.conformance.adapters.per_node_levels import (
    Node,
    NodeNames,
    TreeNoise,
    build_tree,
    gather_level,
    levels_of,
)
from branchgrpo.reference.implementation import Levels, Masks, Trace
from branchgrpo.reference.options import Fusion, Normalization, PruningRule
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, NoiseSource, Prompt, VelocityModel
from branchgrpo.reference.types import Reduction

HOOKS = {"rollout": "grow_tree", "fuse": "fuse_tree", "normalize": "score_tree", "prune": "prune_tree"}
"""Operation → the method of ``PerNodeImplementation`` that a subclass defines for it."""


class PerNodeImplementation(PartialImplementation):
    """A foreign tree class behind the protocol; a subclass defines the hooks that its code has.

    Attributes:
        names: what the nodes call their parts.
    """

    names = NodeNames()

    @property
    def capabilities(self) -> frozenset[str]:
        """The operations whose hook the subclass defines, and operations that it defines itself."""
        base, own = PerNodeImplementation, type(self)
        hooked = {op for op, hook in HOOKS.items() if getattr(own, hook) is not getattr(base, hook)}
        return own_operations(self, base) | hooked

    def grow_tree(
        self,
        plan: Plan,
        model: VelocityModel,
        condition: Condition,
        noise: TreeNoise,
        storage_dtype: torch.dtype,
        reduction: Reduction,
    ) -> Node:
        """Hook: grow one tree and return its root.

        Args:
            plan: levels, kernels, branching factors, spreads and leaf output.
            model: ``model(x [n, *latent], sigma [n], condition)``; for n states it wants n conditions.
            condition: one item, the prompt's.
            noise: every draw of the tree, and whose tree it is: ``noise.prompt``, ``noise.root_index``.
            storage_dtype: dtype in which states are kept.
            reduction: of log-probabilities.
        """
        raise undefined(self, "grow_tree")

    def stds(self, plan: Plan) -> Sequence[float]:
        """Hook: the std by which each of the T steps scales its noise; 0 where it draws none."""
        raise undefined(self, "stds")

    def make_node(
        self, parent: Node | None, state: Tensor, mean: Tensor | None, log_prob: Tensor | None, depth: int
    ) -> Node:
        """Hook: a node of the foreign class with these parts, appended to its parent's children; for fusion and on."""
        raise undefined(self, "make_node")

    def fuse_tree(self, root: Node, rewards: Sequence[float], options: Fusion) -> None:
        """Hook: leave the fused value of every node in its ``names.value``; ``rewards`` are the leaves', in order."""
        raise undefined(self, "fuse_tree")

    def score_tree(self, root: Node, options: Normalization) -> None:
        """Hook: from the values, leave the advantage of every node in its ``names.advantage``; one reward, clipped."""
        raise undefined(self, "score_tree")

    def prune_tree(
        self, root: Node, keys: Sequence[float], rules: Sequence[PruningRule], iteration: int
    ) -> Collection[Node]:
        """Hook: the nodes whose edge stays; ``keys`` order the leaves (PRUNE-2)."""
        raise undefined(self, "prune_tree")

    @torch.no_grad()
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
        """Every tree by ``grow_tree``, flattened."""
        trees = []
        for i, prompt in enumerate(prompts):
            own = condition.gather(torch.tensor([i]))
            for root in range(plan.roots):
                draws = TreeNoise(noise, iteration, prompt, root, tuple(latent_shape), dtype)
                grown = self.grow_tree(plan, model, own, draws, storage_dtype, reduction)
                trees.append(levels_of(grown, plan, self.names))
        count, depths = len(prompts), range(1, plan.steps + 1)
        noisy = [step in plan.stochastic_steps for step in range(plan.steps)]
        return Trace(
            plan,
            tuple(prompts),
            tuple(gather_level(trees, count, depth, self.names.state) for depth in range(plan.steps + 1)),
            tuple(gather_level(trees, count, depth, self.names.mean) for depth in depths),
            torch.tensor([float(std) for std in self.stds(plan)], dtype=torch.float64),
            tuple(
                gather_level(trees, count, depth, self.names.log_prob).double() if noisy[depth - 1] else None
                for depth in depths
            ),
        )

    def rebuild(self, trace: Trace) -> list[list[list[Node]]]:
        """Foreign trees of a trace, prompts outermost, roots next, depth by depth."""

        def make(depth: int, index: int, parent: Node | None, prompt: int, column: int) -> Node:
            del index
            mean = trace.means[depth - 1][prompt, column] if depth else None
            level = trace.log_probs[depth - 1] if depth else None
            log_prob = None if level is None else level[prompt, column]
            return self.make_node(parent, trace.states[depth][prompt, column], mean, log_prob, depth)

        count, roots = len(trace.prompts), trace.plan.roots
        return [build_tree(trace.plan, make, prompt, root) for prompt in range(count) for root in range(roots)]

    def bare(self, plan: Plan, values: Levels) -> list[list[list[Node]]]:
        """Foreign trees without states that carry values only."""
        empty = torch.zeros(1, dtype=torch.float64)

        def make(depth: int, index: int, parent: Node | None, prompt: int, column: int) -> Node:
            del index
            node = self.make_node(parent, empty, empty if depth else None, None, depth)
            setattr(node, self.names.value, float(values[depth][prompt, column]))
            return node

        count = len(values[-1])
        return [build_tree(plan, make, prompt, root) for prompt in range(count) for root in range(plan.roots)]

    def fuse(self, trace: Trace, rewards: Float64[Tensor, "prompts leaves models"], options: Fusion) -> Levels:
        """Values by ``fuse_tree``, one reward model after the other."""
        count, columns = len(trace.prompts), []
        for model in range(rewards.shape[2]):
            trees = self.rebuild(trace)
            own = rewards[..., model].reshape(len(trees), -1)
            for tree, of_leaves in zip(trees, own, strict=True):
                self.fuse_tree(tree[0][0], of_leaves.tolist(), options)
            depths = range(trace.plan.steps + 1)
            columns.append([gather_level(trees, count, depth, self.names.value).double() for depth in depths])
        return tuple(torch.stack(parts, dim=-1) for parts in zip(*columns, strict=True))

    def normalize(self, plan: Plan, values: Levels, weights: Sequence[float], options: Normalization) -> Levels:
        """Advantages by ``score_tree``, for one reward of weight 1."""
        require(tuple(weights) == (1.0,), "advantages of one reward of weight 1 only")
        require(options.mean_scope == options.std_scope == "tree", "advantages within a tree only")
        trees = self.bare(plan, tuple(level[..., 0] for level in values))
        for tree in trees:
            self.score_tree(tree[0][0], options)
        count = len(values[0])
        return tuple(
            gather_level(trees, count, depth, self.names.advantage).double() for depth in range(plan.steps + 1)
        )

    def prune(
        self, plan: Plan, keys: Float64[Tensor, "prompts leaves"], rules: Sequence[PruningRule], iteration: int
    ) -> Masks:
        """Edges that stay by ``prune_tree``."""
        shapes = [(len(keys), plan.roots * size) for size in plan.level_sizes]
        values = (*(torch.zeros(shape, dtype=torch.float64) for shape in shapes[:-1]), keys)
        trees = self.bare(plan, values)
        own = keys.reshape(len(trees), -1)
        stays: set[int] = set()
        for tree, of_leaves in zip(trees, own, strict=True):
            stays |= {id(node) for node in self.prune_tree(tree[0][0], of_leaves.tolist(), rules, iteration)}
        return tuple(
            torch.tensor([id(node) in stays for tree in trees for node in tree[depth]]).reshape(shapes[depth])
            for depth in range(1, plan.steps + 1)
        )
