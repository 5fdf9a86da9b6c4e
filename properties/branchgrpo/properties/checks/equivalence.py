"""Two implementations give the same values, advantages, keys and masks for the same input."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.properties.definitions import as_arrays, conditioning
from branchgrpo.properties.exact import all_close, as_array, close, elementwise, holds
from branchgrpo.properties.findings import Finding
from branchgrpo.properties.subject import Subject
from branchgrpo.properties.tolerances import PARITY
from branchgrpo.reference.implementation import Trace
from branchgrpo.reference.options import Fusion, Normalization, PruningRule

NORMALIZATION = "NORM-1 NORM-2 NORM-3 NORM-4 NORM-5 NORM-6"


@dataclass(frozen=True)
class Pipeline:
    """What turns rewards into advantages and masks.

    Attributes:
        fusion, normalization, rules: the options.
        weights: one a reward model.
        iteration: for depth windows.
    """

    fusion: Fusion
    normalization: Normalization
    rules: tuple[PruningRule, ...]
    weights: tuple[float, ...]
    iteration: int = 0


def pipeline_findings(
    subject: Subject,
    other: Subject,
    trace: Trace,
    rewards: Float64[Tensor, "prompts leaves models"],
    pipeline: Pipeline,
) -> list[Finding]:
    """Values, advantages and keys agree to rounding; masks from the same keys are the same.

    Each stage of ``subject`` gets the other's input, so that a discrepancy is reported where it arises.
    """
    mine, theirs = subject.implementation, other.implementation
    plan, weights = trace.plan, pipeline.weights
    values = theirs.fuse(trace, rewards, pipeline.fusion)
    expected = theirs.normalize(plan, values, weights, pipeline.normalization)
    keys = theirs.leaf_keys(plan, values, weights, pipeline.normalization)
    masks = theirs.prune(plan, keys, pipeline.rules, pipeline.iteration)
    found_values = mine.fuse(trace, rewards, pipeline.fusion)
    found = mine.normalize(plan, values, weights, pipeline.normalization)
    found_keys = mine.leaf_keys(plan, values, weights, pipeline.normalization)
    found_masks = mine.prune(plan, keys, pipeline.rules, pipeline.iteration)
    name = f"{subject.name} = {other.name}"
    size = float(rewards.abs().max())
    scales = conditioning(plan, as_arrays(values), weights, pipeline.normalization)
    key_scale = np.maximum(np.abs(as_array(keys)), 1.0) if len(weights) == 1 else scales[-1]
    same = [torch.equal(a.cpu(), b.cpu()) for a, b in zip(found_masks, masks, strict=True)]
    return [
        all_close(f"{name}: fused values", "FUSE-1 FUSE-2 FUSE-4 FUSE-5", found_values, values, PARITY, size),
        elementwise(f"{name}: advantages", NORMALIZATION, found, expected, scales, PARITY),
        elementwise(f"{name}: leaf keys", "PRUNE-2", [found_keys], [keys], [key_scale], PARITY),
        holds(f"{name}: masks", "PRUNE-3 PRUNE-4 PRUNE-5", same, sum(mask.numel() for mask in masks)),
    ]


def trace_findings(name: str, found: Trace, expected: Trace, tolerance: float) -> list[Finding]:
    """States, means, stds and log-probabilities of two rollouts of one plan."""
    gaps = [(a is None) == (b is None) for a, b in zip(found.log_probs, expected.log_probs, strict=True)]

    def present(trace: Trace) -> Sequence[Tensor]:
        return [edges for edges in trace.log_probs if edges is not None]

    return [
        all_close(f"{name}: states", "ROLL-1 ROLL-5 ROLL-6", found.states, expected.states, tolerance),
        all_close(f"{name}: means", "KERN-2 KERN-3 KERN-4 ROLL-3", found.means, expected.means, tolerance),
        close(f"{name}: stds", "KERN-5", found.stds, expected.stds, PARITY),
        holds(f"{name}: edges with a log-probability", "LOGP-4", gaps),
        all_close(f"{name}: log-probabilities", "LOGP-1 LOGP-2 LOGP-3", present(found), present(expected), tolerance),
    ]
