"""Exact covariance between any two nodes, and of all leaves under a node (spec: oracle)."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from branchgrpo.oracle.chain import Chain
from branchgrpo.oracle.laws import Start, gain, node_variances
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.plan import Plan


@dataclass(frozen=True)
class Address:
    """A node of a plan: its root, its depth, and its index in that level of that root's tree.  Clause: ORACLE-6."""

    depth: int
    index: int
    root: int = 0


def sibling_correlation(spread: float) -> float:
    """ρ = 1/(1 + s²), 0 at s = ∞.  Clause: ORACLE-6.  Source: Cov(aξ₀ + cη_b, aξ₀ + cη_b′) = a²·I, a² = 1/(1 + s²)."""
    return 0.0 if math.isinf(spread) else 1.0 / (1.0 + spread**2)


def below(plan: Plan, depth: int, stop: int) -> int:
    """Π_{d ≤ i < d′} K_i: nodes of depth d′ under one node of depth d.  Clause: ORACLE-6."""
    return math.prod(plan.branching[depth:stop])


def check_address(plan: Plan, node: Address) -> None:
    """Refuse a node that the plan has not.

    Clause: ORACLE-6.

    Raises:
        InputError: names the part out of range.
    """
    if not 0 <= node.depth <= plan.steps:
        raise InputError("node.depth", node.depth, f"in 0..{plan.steps}")
    for name, value, size in (("index", node.index, below(plan, 0, node.depth)), ("root", node.root, plan.roots)):
        if not 0 <= value < size:
            raise InputError(f"node.{name}", value, f"in 0..{size - 1} at depth {node.depth}")


def parting_depth(plan: Plan, a: Address, b: Address) -> int:
    """Depth of the last common ancestor of two nodes of one tree.  Clause: ORACLE-6."""
    depth = min(a.depth, b.depth)
    while a.index // below(plan, depth, a.depth) != b.index // below(plan, depth, b.depth):
        depth -= 1
    return depth


def node_covariance(plan: Plan, chain: Chain, start: Start, a: Address, b: Address) -> float:
    """Cov of one element of two nodes below the start: G(j→a) G(j→b) V_j + ρ_j std_j² G(j+1→a) G(j+1→b).

    Clause: ORACLE-6.  The second term is there when neither is the other's ancestor (they part at a split j); nodes of
    different roots are independent.

    Raises:
        InputError: a node that does not exist or does not lie under one node of the start's depth.
    """
    check_address(plan, a)
    check_address(plan, b)
    if a.root != b.root:
        if start.depth > 0:
            raise InputError("node.root", b.root, f"{a.root}: both below the given node")
        return 0.0
    j = parting_depth(plan, a, b)
    if j < start.depth:
        raise InputError("nodes", (a, b), f"below one node of depth {start.depth}")
    at_parting = float(node_variances(chain, start)[j - start.depth])
    common = gain(chain, j, a.depth) * gain(chain, j, b.depth) * at_parting
    if j in (a.depth, b.depth):
        return common
    shared = sibling_correlation(plan.spreads[j]) * float(chain.std[j]) ** 2
    return common + shared * gain(chain, j + 1, a.depth) * gain(chain, j + 1, b.depth)


def leaf_covariance(plan: Plan, chain: Chain, start: Start, parting: int) -> float:
    """c_j of an element: (Π_{i≥j} α_i)² V_j + ρ_j std_j² (Π_{i>j} α_i)², for leaves that part at split j.

    Clause: ORACLE-7.
    """
    at_parting = float(node_variances(chain, start)[parting - start.depth])
    shared = sibling_correlation(plan.spreads[parting]) * float(chain.std[parting]) ** 2
    steps = chain.steps
    return gain(chain, parting, steps) ** 2 * at_parting + gain(chain, parting + 1, steps) ** 2 * shared


def leaf_parting_depths(plan: Plan, depth: int = 0) -> Int64[np.ndarray, "leaves leaves"]:
    """Parting depth of every pair of leaves under one node of the given depth; T on the diagonal.  Clause: ORACLE-6."""
    steps = plan.steps
    leaves = np.arange(below(plan, depth, steps))
    parting = np.full((leaves.size, leaves.size), depth)
    for d in range(depth + 1, steps + 1):
        ancestor = leaves // below(plan, d, steps)
        parting[ancestor[:, None] == ancestor[None, :]] = d
    return parting


def leaf_covariance_matrix(plan: Plan, chain: Chain, start: Start) -> Float64[np.ndarray, "leaves leaves"]:
    """Cov of one element over the leaves under the start, in leaf order: c_j by parting depth.  Clause: ORACLE-7."""
    parting = leaf_parting_depths(plan, start.depth)
    matrix = np.full(parting.shape, float(node_variances(chain, start)[-1]))
    for j in np.unique(parting[parting < plan.steps]).tolist():
        matrix[parting == j] = leaf_covariance(plan, chain, start, j)
    return matrix
