"""The trees of all prompts as level-order arrays (spec: rollout, trace)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.optimized.kernels import plan_stds
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Prompt
from branchgrpo.reference.types import Reduction

Levels = tuple[Tensor, ...]
"""Entry d holds the nodes of depth d, ``[prompts, R·n_d, *rest]``: roots outermost, then level order. The children of
node j are nodes j·K … j·K + K − 1 of the next entry, so the leaves under a node are contiguous (TRACE-2)."""


@dataclass(frozen=True, eq=False)
class Tree:
    """The trees of all prompts and roots under one plan; every state is held once.

    Clause: ROLL-1, ROLL-5, TRACE-2.

    Attributes:
        plan: what was grown.
        prompts: one a row of every array.
        states: depth 0 … T, as stored.
        log_probs: entry d − 1 for depth d, ``[prompts, R·n_d]`` float64; None where the step is deterministic.
        dtype, device: of the arithmetic, which the update repeats; the arrays themselves may live elsewhere.
        reduction: the one in which the log-probabilities were taken.
        means: entry d − 1 for depth d, kept on request only.
    """

    plan: Plan
    prompts: tuple[Prompt, ...]
    states: Levels
    log_probs: tuple[Float64[Tensor, "prompts _"] | None, ...]
    dtype: torch.dtype
    device: torch.device
    reduction: Reduction
    means: Levels | None = None

    @property
    def stds(self) -> tuple[float, ...]:
        """Std of every step; 0 where it is deterministic."""
        return plan_stds(self.plan)

    @property
    def leaves(self) -> Float[Tensor, "prompts leaves *latent"]:
        """Leaf outputs: x_T under ``sample``, x̂⁰ of the last step under ``denoised``.  Clause: PLAN-6."""
        return self.states[-1]


def segments(plan: Plan, depth: int, leaves: int) -> int:
    """Leaves (of ``leaves`` in all) under one node of a depth: the length of its contiguous segment."""
    return leaves // (plan.roots * plan.level_sizes[depth])
