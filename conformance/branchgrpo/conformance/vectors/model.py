"""A velocity that any language can state, and a noise source that reads draws from a table."""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, Guidance, NoiseKeys, NoiseRole, Prompt, TensorCondition

WEIGHTS = ("weight", "sigma", "bias", "label")
"""Names of the linear model's arrays: A ``[D, D]``, b, c and d ``[D]``."""


class LinearVelocity(torch.nn.Module):
    """v = A x + b σ + c + g y d for the flattened state x and the condition's label y.

    g is 1, or w under classifier-free guidance: the branch without a condition has y = 0, so that
    v⁻ + w (v⁺ − v⁻) is this (ROLL-4).
    """

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype, guidance: Guidance) -> None:
        super().__init__()
        self.guidance, self.items = guidance, 0
        self.weight, self.sigma, self.bias, self.label = (
            torch.nn.Parameter(weights[name].to(dtype)) for name in WEIGHTS
        )

    def forward(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """Velocity of every item; counts the items."""
        assert isinstance(condition, TensorCondition)
        label = condition.tensors["label"]
        if len(label) != len(x):
            raise InputError("len(condition)", len(label), f"{len(x)}, one an item")
        self.items += len(x)
        scale = self.guidance.scale if self.guidance.kind == "classifier_free" else 1.0
        flat = x.flatten(1) @ self.weight.mT + sigma[:, None] * self.sigma + self.bias
        return (flat + scale * label.to(x.dtype)[:, None] * self.label).reshape(x.shape)


class TableNoise:
    """Draws from arrays in level order, served by key; a key that the table does not have is an error.

    Args:
        iteration: the iteration that keys have to name.
        prompts: their ids are part of the keys.
        roots: R.
        tables: (role, depth) → ``[prompts, R·n_d, *latent]``.
    """

    def __init__(
        self, iteration: int, prompts: Sequence[Prompt], roots: int, tables: Mapping[tuple[str, int], Tensor]
    ) -> None:
        self.iteration, self.roots, self.tables = iteration, roots, tables
        self.rows = {prompt.id: row for row, prompt in enumerate(prompts)}

    def draw(
        self, keys: NoiseKeys, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Float[Tensor, "draws *latent"]:
        """The table's entry of every key."""
        table = self.tables.get((keys.role.value, keys.depth))
        if table is None or keys.iteration != self.iteration:
            raise InputError("noise key", (keys.iteration, keys.role.value, keys.depth), "one of the vector's draws")
        size = table.shape[1] // self.roots
        places = zip(keys.prompts.tolist(), keys.roots.tolist(), keys.nodes.tolist(), strict=True)
        found = [self.entry(table, size, *place) for place in places]
        return torch.stack(found).reshape(len(found), *shape).to(device=device, dtype=dtype)

    def entry(self, table: Tensor, size: int, prompt: int, root: int, node: int) -> Tensor:
        """One draw."""
        if prompt not in self.rows or not (0 <= root < self.roots and 0 <= node < size):
            raise InputError("noise key", (prompt, root, node), "one of the vector's draws")
        return table[self.rows[prompt], root * size + node]


def draw_shapes(plan: Plan, prompts: int, latent: Sequence[int]) -> dict[tuple[str, int], tuple[int, ...]]:
    """The draws that a rollout of a plan may ask for, and their shapes (NOISE-3)."""

    def shape(depth: int) -> tuple[int, ...]:
        return (prompts, plan.roots * plan.level_sizes[depth], *latent)

    shapes = {(NoiseRole.ROOT.value, 0): shape(0)}
    for step in plan.stochastic_steps:
        shapes[NoiseRole.PRIVATE.value, step + 1] = shape(step + 1)
        if plan.branching[step] > 1:
            shapes[NoiseRole.SHARED.value, step] = shape(step)
    return shapes


def elements(latent: Sequence[int]) -> int:
    """D."""
    return math.prod(latent)
