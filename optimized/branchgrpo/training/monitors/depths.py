"""Gradient norm a depth: a costly monitor, one backward pass through every trained edge."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from branchgrpo.optimized.pruning import Masks
from branchgrpo.optimized.tree import Tree
from branchgrpo.training.monitors.measure import depth_name

Accumulate = Callable[[Sequence[Masks]], None]
"""Adds the gradient of the edges in the given masks, one set of masks a tree, and of no others, with the coefficients
and step weights that they have in the whole update (``Parallel.owned`` does)."""


def one_step_masks(tree: Tree, step: int) -> Masks:
    """All edges of one step, and none of the others."""
    shapes = [level.shape[:2] for level in tree.states[1:]]
    return tuple(torch.full(shape, i == step, dtype=torch.bool) for i, shape in enumerate(shapes))


@contextmanager
def gradients_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """The parameters' gradients are put aside within, and back at the end."""
    kept = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, kept, strict=True):
            p.grad = grad


def total_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Euclidean norm of all gradients together, in float64; sharded ones are summed over their shards."""
    squares = torch.zeros((), dtype=torch.float64)
    for p in parameters:
        if p.grad is not None:
            part = p.grad.detach().double().square().sum()
            whole = part.full_tensor() if hasattr(part, "full_tensor") else part
            squares += whole.cpu()
    return float(squares.sqrt())


def gradient_norms_by_depth(
    trees: Sequence[Tree], parameters: Sequence[nn.Parameter], accumulate: Accumulate
) -> dict[str, float]:
    """``gradient_norm/depth_DD``: norm of each trainable depth's part of the update; the parts add up to it.

    Measured before the first optimiser step, at the policy that sampled. Every rank calls it.

    Args:
        trees: of the update, on this rank.
        parameters: that are trained; their gradients stay as they are.
        accumulate: adds some edges' gradient.
    """
    steps = sorted({step for tree in trees for step in tree.plan.trainable_steps})
    found = {}
    with gradients_aside(parameters):
        for step in steps:
            accumulate([one_step_masks(tree, step) for tree in trees])
            found[f"gradient_norm/{depth_name(step + 1)}"] = total_norm(parameters)
            for p in parameters:
                p.grad = None
    return found
