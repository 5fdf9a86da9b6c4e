"""The tree a rollout grows: nodes and the edges that end in them (spec: rollout)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Optional

from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Prompt


@dataclass(eq=False, repr=False)
class Node:
    """A state of the tree, with the edge that ends in it.

    Attributes:
        depth: d; the state is at σ_d.
        index: position in its level, in level order.
        state: the state as stored.
        parent: None for the root.
        mean, std, log_prob: of the edge from the parent; log_prob is None where the step is deterministic.
        children: in sibling order.
    """

    depth: int
    index: int
    state: Float[Tensor, "*latent"]
    parent: Optional["Node"] = None
    mean: Float[Tensor, "*latent"] | None = None
    std: float = 0.0
    log_prob: Float64[Tensor, ""] | None = None
    children: list["Node"] = field(default_factory=list)

    def __repr__(self) -> str:
        """Depth and index; the states and the sub-tree would fill pages."""
        return f"Node(depth={self.depth}, index={self.index})"

    def walk(self) -> Iterator["Node"]:
        """The node and all its descendants, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def leaves(self) -> list["Node"]:
        """L(n): the leaves under the node, in order; a leaf's own list is itself."""
        return [self] if not self.children else [leaf for child in self.children for leaf in child.leaves()]


@dataclass(frozen=True, eq=False)
class Tree:
    """One root's tree of one prompt.  Clause: ROLL-1."""

    plan: Plan
    prompt: Prompt
    root_index: int
    root: Node

    def level(self, depth: int) -> list[Node]:
        """Nodes of one depth in level order: the children of node j are j·K … j·K + K − 1."""
        return [node for node in self.root.walk() if node.depth == depth]

    def edges(self) -> list[Node]:
        """All edges, each named by the child it ends in, level by level."""
        return sorted((n for n in self.root.walk() if n.parent is not None), key=lambda n: (n.depth, n.index))
