"""Rewards of a tree's leaves (spec: reward)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.errors import RewardError
from branchgrpo.reference.protocols import Prompt, RewardModel
from branchgrpo.reference.tree import Node, Tree

NodeValues = dict[Node, Float64[Tensor, "models"]]
"""A value a node and reward model."""


def check_rewards(rewards: Float[Tensor, "*found"], prompts: Sequence[Prompt], model: str) -> Float64[Tensor, "leaves"]:
    """One finite real a leaf, as float64.

    Clause: REW-1, REW-2, ERR-4.

    Raises:
        RewardError: a wrong length, or a non-finite reward, with leaf, prompt and reward model.
    """
    if rewards.shape != (len(prompts),):
        raise RewardError(f"rewards of {model}: shape", tuple(rewards.shape), f"({len(prompts)},), one a leaf")
    values = rewards.double()
    for leaf in torch.nonzero(~torch.isfinite(values)).flatten().tolist():
        name = f"reward of leaf {leaf}, prompt {prompts[leaf].id} ({prompts[leaf].text!r}), model {model}"
        raise RewardError(name, values[leaf].item(), "finite")
    return values


def score(tree: Tree, models: Sequence[RewardModel]) -> NodeValues:
    """The rewards of every leaf by every reward model.

    Clause: REW-1 … REW-3.

    Args:
        tree: a grown tree.
        models: M ≥ 1 reward models.

    Returns:
        For each leaf a float64 tensor of M rewards.
    """
    if not models:
        raise RewardError("models", list(models), "at least one reward model")
    leaves = tree.root.leaves()
    prompts = [tree.prompt] * len(leaves)
    samples = torch.stack([leaf.state for leaf in leaves])
    columns = [check_rewards(model(samples, prompts), prompts, model.name) for model in models]
    return dict(zip(leaves, torch.stack(columns, dim=1), strict=True))
