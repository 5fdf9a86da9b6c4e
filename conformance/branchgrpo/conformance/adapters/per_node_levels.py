"""Between nodes of a foreign tree class and level-order arrays (TRACE-2)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseKeys, NoiseRole, NoiseSource, Prompt

Node = Any
"""A node of a foreign class; read by attribute names that its adapter declares."""


@dataclass(frozen=True)
class NodeNames:
    """What a foreign node calls its parts.

    Attributes:
        children: list of children in sibling order, empty at a leaf.
        state: state as stored.
        mean, log_prob: of the edge that ends in the node; None at the root, the latter also at deterministic steps.
        value, advantage: where its fusion and its normalization leave their results.
    """

    children: str = "children"
    state: str = "state"
    mean: str = "mean"
    log_prob: str = "log_prob"
    value: str = "value"
    advantage: str = "advantage"


@dataclass(frozen=True)
class TreeNoise:
    """The draws of one tree by name, for code that grows it node by node (NOISE-3).

    Attributes:
        source, iteration, prompt, root_index: parts of every key.
        latent_shape, dtype: of a draw.
    """

    source: NoiseSource
    iteration: int
    prompt: Prompt
    root_index: int
    latent_shape: tuple[int, ...]
    dtype: torch.dtype

    def draw(self, role: NoiseRole, depth: int, index: int) -> Float[Tensor, "*latent"]:
        """One draw."""
        at = [torch.tensor([part], dtype=torch.int64) for part in (self.prompt.id, self.root_index, index)]
        keys = NoiseKeys(self.iteration, role, depth, *at)
        return self.source.draw(keys, self.latent_shape, self.dtype, torch.device("cpu"))[0]

    def root(self) -> Float[Tensor, "*latent"]:
        """The initial state."""
        return self.draw(NoiseRole.ROOT, 0, 0)

    def shared(self, depth: int, index: int) -> Float[Tensor, "*latent"]:
        """ξ₀ of a splitting parent, by its depth and its index in its level."""
        return self.draw(NoiseRole.SHARED, depth, index)

    def private(self, depth: int, index: int) -> Float[Tensor, "*latent"]:
        """η of a child, by its depth and its index in its level: child b of parent j has index j·K + b."""
        return self.draw(NoiseRole.PRIVATE, depth, index)


def levels_of(root: Node, plan: Plan, names: NodeNames) -> list[list[Node]]:
    """A foreign tree's nodes depth by depth, in level order.

    Raises:
        InputError: a node with another number of children than the plan's.
    """
    levels = [[root]]
    for depth, factor in enumerate(plan.branching):
        below: list[Node] = []
        for index, node in enumerate(levels[-1]):
            children = list(getattr(node, names.children))
            if len(children) != factor:
                raise InputError(f"children of node {index} at depth {depth}", len(children), f"{factor}")
            below += children
        levels.append(below)
    return levels


def part_of(node: Node, name: str, depth: int) -> Tensor:
    """One attribute of a node as a tensor; what is no array of its own dtype, such as a Python float, is float64.

    Raises:
        InputError: an attribute that is missing or holds no numbers.
    """
    found = getattr(node, name, None)
    if isinstance(found, Tensor):
        return found
    try:
        return torch.as_tensor(found, dtype=None if hasattr(found, "dtype") else torch.float64)
    except (TypeError, ValueError, RuntimeError):
        where = f"{name} of a {type(node).__name__} at depth {depth}"
        raise InputError(where, found, "a tensor or a number; NodeNames says what a node's parts are called") from None


def gather_level(trees: Sequence[list[list[Node]]], prompts: int, depth: int, name: str) -> Tensor:
    """One attribute of all nodes of a depth, ``[prompts, R·n_d, *rest]``."""
    stacked = torch.stack([part_of(node, name, depth) for tree in trees for node in tree[depth]])
    return stacked.reshape(prompts, -1, *stacked.shape[1:])


def build_tree(
    plan: Plan, make: Callable[[int, int, Node | None, int, int], Node], prompt: int, root: int
) -> list[list[Node]]:
    """A foreign tree from arrays.

    Args:
        plan: its shape.
        make: makes the node at (prompt, column) of a depth under a parent and links the two:
            ``make(depth, index in its level, parent, prompt, column)``.
        prompt, root: which tree.

    Returns:
        Its nodes depth by depth.
    """
    levels = [[make(0, 0, None, prompt, root)]]
    for depth, factor in enumerate(plan.branching, start=1):
        width = plan.level_sizes[depth]
        indexed = [(parent, j * factor + b) for j, parent in enumerate(levels[-1]) for b in range(factor)]
        levels.append([make(depth, index, parent, prompt, root * width + index) for parent, index in indexed])
    return levels
