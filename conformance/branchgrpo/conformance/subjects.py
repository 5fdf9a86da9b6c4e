"""Small models and rewards that drive an implementation: fixed, seeded, with nothing of the algorithm in them."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.protocols import Condition, Guidance, Prompt, TensorCondition


def condition_for(prompts: Sequence[Prompt], dtype: torch.dtype, device: torch.device) -> TensorCondition:
    """One label a prompt: a bounded function of its id."""
    labels = torch.tensor([math.sin(prompt.id) for prompt in prompts], dtype=dtype, device=device)
    return TensorCondition({"label": labels})


class Network(torch.nn.Module):
    """A small smooth velocity that reads every element of x, σ and the label; the same weights every time.

    Args:
        elements: D, the number of latent elements.
        scale: size of the output; two networks of different scale serve as policy and frozen reference.
    """

    guidance = Guidance()

    def __init__(self, elements: int, scale: float = 0.5, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(20)
        inner = torch.randn(elements + 2, 12, generator=generator, dtype=torch.float64) / math.sqrt(elements)
        outer = torch.randn(12, elements, generator=generator, dtype=torch.float64) * scale
        self.inner = torch.nn.Parameter(inner.to(dtype))
        self.outer = torch.nn.Parameter(outer.to(dtype))

    def forward(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """tanh of a linear map of (x, σ, label), mapped back to the latent's shape."""
        assert isinstance(condition, TensorCondition)
        label = condition.tensors["label"].to(x.dtype)
        features = torch.cat([x.flatten(1), sigma.to(x.dtype)[:, None], label[:, None]], dim=1)
        hidden = torch.tanh(features @ self.inner.to(x.dtype))
        return (hidden @ self.outer.to(x.dtype)).view_as(x) + 0.3 * x


class GuidedNetwork(Network):
    """Classifier-free guidance inside the call: v = v⁻ + w·(v⁺ − v⁻), both branches in one batch (ROLL-4)."""

    guidance = Guidance("classifier_free", 3.0)

    def forward(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """Guided velocity."""
        assert isinstance(condition, TensorCondition)
        label = condition.tensors["label"]
        both = TensorCondition({"label": torch.cat([label, torch.zeros_like(label)])})
        positive, negative = super().forward(torch.cat([x, x]), torch.cat([sigma, sigma]), both).chunk(2)
        return negative + self.guidance.scale * (positive - negative)


class Recorder:
    """A velocity model that counts the items it evaluates and keeps their noise levels.

    Attributes:
        items: evaluated items so far.
        sigmas: every noise level seen.
    """

    def __init__(self, model: torch.nn.Module, guidance: Guidance) -> None:
        self.model, self.guidance = model, guidance
        self.items = 0
        self.sigmas: set[float] = set()

    def __call__(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """The model's own velocity."""
        self.items += len(x)
        self.sigmas |= set(sigma.double().tolist())
        velocity: Tensor = self.model(x, sigma, condition)
        return velocity


class Distance:
    """Reward −mean (x − t)² a sample; in float64."""

    version, range = "1", (-math.inf, 0.0)

    def __init__(self, target: float) -> None:
        self.target, self.name = target, f"distance to {target:g}"

    def __call__(self, samples: Tensor, prompts: Sequence[Prompt]) -> Float64[Tensor, "items"]:
        """One reward a sample."""
        return -(samples.double() - self.target).square().flatten(1).mean(dim=1)


class Slope:
    """Reward that is linear in the sample: a fixed direction, mean over elements."""

    version, range, name = "1", (-math.inf, math.inf), "slope"

    def __call__(self, samples: Tensor, prompts: Sequence[Prompt]) -> Float64[Tensor, "items"]:
        """One reward a sample."""
        flat = samples.double().flatten(1)
        return flat @ torch.cos(torch.arange(flat.shape[1], dtype=torch.float64, device=flat.device)) / flat.shape[1]


class Constant:
    """The same reward for every sample: advantages are exactly 0 (NORM-4)."""

    version, range, name = "1", (0.3, 0.3), "constant"

    def __call__(self, samples: Tensor, prompts: Sequence[Prompt]) -> Float64[Tensor, "items"]:
        """0.3 a sample."""
        return torch.full((len(samples),), 0.3, dtype=torch.float64, device=samples.device)
