"""A rollout as flat level-order arrays: the interchange between implementations (spec: trace)."""

from dataclasses import dataclass

from jaxtyping import Bool, Float64
from torch import Tensor

from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Prompt

Levels = tuple[Tensor, ...]
"""Entry d holds the nodes of depth d, ``[prompts, R·n_d, *rest]``, roots outermost, then level order: the children of
node j are nodes j·K … j·K + K − 1 of the next level (TRACE-2)."""

Masks = tuple[Bool[Tensor, "prompts _"], ...]
"""Edges by the child they end in: entry d − 1 for child depth d, ``[prompts, R·n_d]`` (TRACE-2)."""


@dataclass(frozen=True, eq=False)
class Trace:
    """A rollout as flat level-order arrays, the interchange between implementations (TRACE-1 … TRACE-3).

    Attributes:
        plan: the plan that was rolled out.
        prompts: one a tree bundle.
        states: depth 0 … T, as stored (realised-action rule): ``[prompts, R·n_d, *latent]``.
        means: depth 1 … T, entry d − 1 for depth d; transition mean of the edge that ends there.
        stds: ``[T]`` standard deviation of every step.
        log_probs: entry d − 1 for depth d, ``[prompts, R·n_d]`` float64; None where the step is deterministic.
    """

    plan: Plan
    prompts: tuple[Prompt, ...]
    states: Levels
    means: Levels
    stds: Float64[Tensor, "steps"]
    log_probs: tuple[Float64[Tensor, "prompts _"] | None, ...]
