"""Spread within prompts: whether one prompt's samples differ, apart from what tells prompts from each other."""

from collections.abc import Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.reference.errors import InputError
from branchgrpo.rewards.diversity.perceptual import mean_pairwise


def squared_distances(vectors: Float64[Tensor, "items dim"]) -> Float64[Tensor, "items items"]:
    """‖x_i − x_j‖² of every pair."""
    return torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist").square()


def groups_of(labels: Sequence[str]) -> dict[str, list[int]]:
    """Items by label, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for item, label in enumerate(labels):
        groups.setdefault(label, []).append(item)
    return groups


def prompt_spread(vectors: Float64[Tensor, "items dim"], prompts: Sequence[str]) -> dict[str, float]:
    """Mean squared distance between two samples of the same prompt, a prompt; one with a single sample is left out.

    Formula: spread(p) = mean_{i≠j ∈ p} ‖x_i − x_j‖², twice the trace of the prompt's sample covariance.

    Raises:
        InputError: another number of labels than of vectors, or no prompt with two samples.
    """
    if len(prompts) != len(vectors):
        raise InputError("len(prompts)", len(prompts), f"{len(vectors)}, one an item")
    spreads = {
        label: mean_pairwise(squared_distances(vectors[items]))
        for label, items in groups_of(prompts).items()
        if len(items) > 1
    }
    if not spreads:
        raise InputError("prompts", "one sample each", "at least one prompt with two samples")
    return spreads
