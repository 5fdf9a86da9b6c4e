"""Rewards of all leaves by all reward models (spec: reward)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.optimized.tree import Tree
from branchgrpo.reference.errors import RewardError
from branchgrpo.reference.protocols import Prompt, RewardModel


def check_rewards(
    rewards: Float[Tensor, "*found"], prompts: Sequence[Prompt], model: str, leaves: int
) -> Float64[Tensor, "items"]:
    """One finite real a leaf, as float64.

    Clause: REW-1, REW-2, ERR-4.

    Args:
        rewards: as returned by the model.
        prompts: for every item its prompt.
        model: name of the reward model.
        leaves: leaves of one root's tree: the message counts within it.

    Raises:
        RewardError: a wrong length, or a non-finite reward, with leaf, prompt and reward model.
    """
    if rewards.shape != (len(prompts),):
        raise RewardError(f"rewards of {model}: shape", tuple(rewards.shape), f"({len(prompts)},), one a leaf")
    values = rewards.double()
    for item in torch.nonzero(~torch.isfinite(values)).flatten().tolist():
        prompt = prompts[item]
        name = f"reward of leaf {item % leaves}, prompt {prompt.id} ({prompt.text!r}), model {model}"
        raise RewardError(name, values[item].item(), "finite")
    return values


@torch.no_grad()
def score(
    tree: Tree, models: Sequence[RewardModel], chunk: int | None = None
) -> Float64[Tensor, "prompts leaves models"]:
    """The rewards of every leaf of every prompt by every reward model, on the CPU.

    Clause: REW-1 … REW-3.

    Args:
        tree: grown trees.
        models: M ≥ 1 reward models.
        chunk: most samples a call; None scores all in one call.

    Raises:
        RewardError: no model, a wrong length or a non-finite reward.
    """
    if not models:
        raise RewardError("models", list(models), "at least one reward model")
    rows, per_prompt = tree.leaves.shape[:2]
    samples = tree.leaves.flatten(0, 1)
    prompts = [prompt for prompt in tree.prompts for _ in range(per_prompt)]
    size = chunk or len(prompts)
    columns = []
    for model in models:
        parts = [
            check_rewards(
                model(samples[i : i + size], prompts[i : i + size]), prompts[i : i + size], model.name, tree.plan.leaves
            )
            for i in range(0, len(prompts), size)
        ]
        columns.append(torch.cat(parts).cpu())
    return torch.unflatten(torch.stack(columns, dim=1), 0, (rows, per_prompt))
