"""Rewards with closed-form expectations under Gaussian samples, for the oracle and for tests."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Prompt


def flatten(samples: Tensor, like: Tensor, prompts: Sequence[Prompt]) -> Float64[Tensor, "items elements"]:
    """Samples as float64 rows, checked against the reward's own vector and the prompts.

    Raises:
        InputError: another number of elements than the reward's, or of prompts than of samples.
    """
    rows = samples.double().flatten(1)
    if rows.shape[1] != like.numel():
        raise InputError("samples: elements an item", rows.shape[1], str(like.numel()))
    if len(prompts) != len(rows):
        raise InputError("len(prompts)", len(prompts), f"{len(rows)}, one an item")
    return rows


class LinearReward:
    """r(x) = ⟨w, x⟩ + b.

    For x ~ N(μ, V·I): E r = ⟨w, μ⟩ + b, Var r = V‖w‖².
    """

    range = (-math.inf, math.inf)
    version = "1"

    def __init__(self, weight: Float[Tensor, "*sample"], offset: float = 0.0) -> None:
        self.name = "linear"
        self.weight = weight.double()
        self.offset = offset

    def __call__(self, samples: Tensor, prompts: Sequence[Prompt]) -> Float64[Tensor, "items"]:
        """One real a sample; the prompt plays no part."""
        rows = flatten(samples, self.weight, prompts)
        return rows @ self.weight.flatten().to(rows.device) + self.offset


class QuadraticReward:
    """r(x) = −½·c·‖x − t‖², c > 0 for a concave reward and c < 0 for a convex one.

    For x ~ N(μ, V·I) in D dimensions: E r = −½·c·(‖μ − t‖² + D·V).
    """

    version = "1"

    def __init__(self, target: Float[Tensor, "*sample"], curvature: float = 1.0) -> None:
        if not math.isfinite(curvature) or curvature == 0.0:
            raise InputError("curvature", curvature, "finite and not 0")
        self.name = "quadratic"
        self.target = target.double()
        self.curvature = curvature
        self.range = (-math.inf, 0.0) if curvature > 0 else (0.0, math.inf)

    def __call__(self, samples: Tensor, prompts: Sequence[Prompt]) -> Float64[Tensor, "items"]:
        """One real a sample; the prompt plays no part."""
        rows = flatten(samples, self.target, prompts) - self.target.flatten().to(samples.device)
        return -0.5 * self.curvature * rows.square().sum(dim=1)


class PromptTargetReward:
    """r(x) = −‖x − t(prompt)‖²/D, a reward that does depend on the prompt: for tests of who is scored with what."""

    name = "prompt_target"
    version = "1"
    range = (-math.inf, 0.0)

    def __init__(self, targets: dict[int, Float[Tensor, "*sample"]]) -> None:
        """``targets``: a sample of the right shape for every prompt id."""
        self.targets = {prompt: target.double().flatten() for prompt, target in targets.items()}

    def __call__(self, samples: Tensor, prompts: Sequence[Prompt]) -> Float64[Tensor, "items"]:
        """Mean squared distance to each sample's own target, negated.

        Raises:
            InputError: a prompt without a target.
        """
        for i, prompt in enumerate(prompts):
            if prompt.id not in self.targets:
                raise InputError(f"prompts[{i}].id", prompt.id, f"one of {sorted(self.targets)}")
        if not prompts:
            return torch.zeros(0, dtype=torch.float64)
        targets = torch.stack([self.targets[prompt.id] for prompt in prompts]).to(samples.device)
        rows = flatten(samples, targets[0], prompts)
        return -(rows - targets).square().mean(dim=1)
