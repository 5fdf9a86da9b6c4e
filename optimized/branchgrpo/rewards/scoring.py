"""Scoring the leaves of a batch of trees: every model on every leaf, each with its own prompt, nothing lost."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.errors import InputError, RewardError, is_integer
from branchgrpo.reference.protocols import Prompt, RewardModel
from branchgrpo.rewards.missing import MissingScores, Words
from branchgrpo.rewards.reward_set import RewardSet
from branchgrpo.rewards.score_log import LeafScore, ScoreLog, no_log

Decode = Callable[[Tensor], Tensor]
"""From latent samples to what the reward models take, e.g. by a VAE."""


@dataclass
class Column:
    """Scores of one model so far: a value a leaf, or the reason why there is none."""

    model: RewardModel
    values: list[float | None]
    reasons: dict[int, str]


def score_leaves(
    samples: Float[Tensor, "prompts leaves *sample"],
    prompts: Sequence[Prompt],
    rewards: RewardSet,
    *,
    decode: Decode | None = None,
    chunk: int = 64,
    log: ScoreLog = no_log,
) -> Float64[Tensor, "prompts leaves models"]:
    """Rewards of all leaves of all prompts by all models.

    Clause: REW-1 … REW-4.  Every model sees every leaf even if another one fails; everything obtained is logged before
    an error is raised.

    Args:
        samples: leaf samples, roots outermost, level order.
        prompts: one a row of ``samples``.
        rewards: M models.
        decode: applied once a chunk, before the models.
        chunk: leaves decoded and scored at a time; it changes no score.
        log: receives all scores of the call, once.

    Raises:
        InputError: a number of prompts that does not match, a chunk below 1.
        RewardError: a missing or non-finite score; names model, prompt and leaf of each.
    """
    count, leaves = samples.shape[:2]
    if len(prompts) != count:
        raise InputError("len(prompts)", len(prompts), f"{count}, one a row of samples")
    if not is_integer(chunk) or chunk < 1:
        raise InputError("chunk", chunk, "an integer ≥ 1")
    flat = samples.flatten(0, 1)
    owners = [prompt for prompt in prompts for _ in range(leaves)]
    columns = [Column(model, [None] * len(owners), {}) for model in rewards.models]
    try:
        for start in range(0, len(owners), chunk):
            part = flat[start : start + chunk]
            decoded = part if decode is None else decode(part)
            for column in columns:
                score_chunk(column, decoded, owners[start : start + chunk], start)
    finally:
        log([leaf_score(column, owners, leaves, i) for column in columns for i in range(len(owners))])
    raise_if_missing(columns, owners, leaves)
    table = torch.tensor([column.values for column in columns], dtype=torch.float64)
    return table.view(len(columns), count, leaves).permute(1, 2, 0).contiguous()


def score_chunk(column: Column, samples: Tensor, prompts: list[Prompt], start: int) -> None:
    """One model on one chunk, written into its column; a score that is missing or not finite leaves its reason."""
    reasons: dict[int, str] = {}
    try:
        found = column.model(samples, prompts)
    except MissingScores as error:
        found, reasons = error.scores, error.reasons
    if not isinstance(found, Tensor):
        returned = f"{column.model.name} returned a {type(found).__name__}, no tensor"
        column.reasons |= dict.fromkeys(range(start, start + len(prompts)), returned)
        return
    if found.shape != (len(prompts),):
        shape = f"{column.model.name} returned shape {tuple(found.shape)} for {len(prompts)} leaves"
        column.reasons |= dict.fromkeys(range(start, start + len(prompts)), shape)
        return
    for i, value in enumerate(found.double().tolist()):
        if math.isfinite(value) and i not in reasons:
            column.values[start + i] = value
        else:
            column.reasons[start + i] = reasons.get(i, f"score is {value}")


def leaf_score(column: Column, owners: list[Prompt], leaves: int, index: int) -> LeafScore:
    """The log line of one leaf."""
    prompt, value = owners[index], column.values[index]
    reason = None if value is not None else column.reasons.get(index, "not scored: the step failed before")
    return LeafScore(column.model.name, column.model.version, prompt.id, prompt.text, index % leaves, value, reason)


def raise_if_missing(columns: list[Column], owners: list[Prompt], leaves: int) -> None:
    """Raise one error that names every missing score.  Clause: REW-2."""
    names = [
        f"model {column.model.name}, leaf {i % leaves}, prompt {owners[i].id} ({owners[i].text!r}): {reason}"
        for column in columns
        for i, reason in sorted(column.reasons.items())
    ]
    if names:
        raise RewardError("rewards", Words("; ".join(names)), "one finite real a leaf and reward model")
