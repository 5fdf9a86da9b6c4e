"""Rewards of all leaves by all reward models (spec: reward)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.optimized.tree import Tree
from branchgrpo.reference.errors import RewardError
from branchgrpo.reference.protocols import Prompt, RewardModel


def check_rewards(
    rewards: Float[Tensor, "*found"], prompts: Sequence[Prompt], model: str, leaves: int, first: int = 0
) -> Float64[Tensor, "items"]:
    """One finite real a leaf, as float64.

    Clause: REW-1, REW-2, ERR-4.

    Args:
        rewards: as returned by the model.
        prompts: for every item its prompt.
        model: name of the reward model.
        leaves: leaves of one root's tree: the message counts within it.
        first: flat index of the first item.

    Raises:
        RewardError: a wrong length, or a non-finite reward, with leaf, prompt and reward model.
    """
    if rewards.shape != (len(prompts),):
        raise RewardError(f"rewards of {model}: shape", tuple(rewards.shape), f"({len(prompts)},), one a leaf")
    values = rewards.double()
    for item in torch.nonzero(~torch.isfinite(values)).flatten().tolist():
        prompt = prompts[item]
        name = f"reward of leaf {(first + item) % leaves}, prompt {prompt.id} ({prompt.text!r}), model {model}"
        raise RewardError(name, values[item].item(), "finite")
    return values


@torch.no_grad()
def score(
    tree: Tree, models: Sequence[RewardModel], chunk: int | None = None, owned: range | None = None
) -> Float64[Tensor, "prompts leaves models"]:
    """The rewards of every leaf of every prompt by every reward model, on the CPU.

    Clause: REW-1 … REW-3.

    Args:
        tree: grown trees.
        models: M ≥ 1 reward models.
        chunk: most samples a call; None scores all in one call.
        owned: flat range of the leaves to score, prompts outermost; the others get 0. None scores all.

    Raises:
        RewardError: no model, a wrong length or a non-finite reward.
    """
    if not models:
        raise RewardError("models", list(models), "at least one reward model")
    rows, per_prompt = tree.leaves.shape[:2]
    every = rows * per_prompt
    mine = range(every) if owned is None else owned
    samples = tree.leaves.flatten(0, 1)[mine.start : mine.stop]
    prompts = [tree.prompts[i // per_prompt] for i in mine]
    size = chunk or max(len(prompts), 1)
    result = torch.zeros(every, len(models), dtype=torch.float64)
    for column, model in enumerate(models):
        for i in range(0, len(prompts), size):
            part = prompts[i : i + size]
            at = mine.start + i
            found = check_rewards(model(samples[i : i + size], part), part, model.name, tree.plan.leaves, at)
            result[at : at + len(part), column] = found.cpu()
    return torch.unflatten(result, 0, (rows, per_prompt))
