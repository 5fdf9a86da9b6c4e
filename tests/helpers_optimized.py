"""Models, plans and comparisons shared by the tests of the batched path."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jaxtyping
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from branchgrpo.reference.plan import Plan
from branchgrpo.reference.presets import preset
from branchgrpo.reference.protocols import Condition, Guidance, Prompt, TensorCondition
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import ODE, Kernel, KernelKind, LeafOutput, Reduction

ROUNDING = 1e-12
"""Two float64 implementations agree to 1e-12 of the tensor's norm: some 10⁴ roundings of 2⁻⁵³ in a row."""

LATENT = (2, 3)


@contextmanager
def shapes_unchecked() -> Iterator[None]:
    """Without shape checks at every call: with them the reference takes minutes on trees of hundreds of nodes, for it
    hands dictionaries of all nodes around. The same functions are checked in the tests of the clauses."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


class SmallModel(nn.Module):
    """A smooth velocity with a parameter a latent element pair, σ and condition mixed in; counts its items."""

    guidance = Guidance()

    def __init__(self, seed: int = 0, latent: Sequence[int] = LATENT, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        size, generator = math.prod(latent), torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(0.5 * torch.randn(size, size, generator=generator, dtype=torch.float64).to(dtype))
        self.bias = nn.Parameter(0.5 * torch.randn(size, generator=generator, dtype=torch.float64).to(dtype))
        self.calls: list[int] = []

    def forward(self, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        assert isinstance(condition, TensorCondition)
        self.calls.append(len(x))
        flat = x.flatten(1)
        shift = (1.0 + sigma)[:, None] * condition.tensors["shift"].to(x.dtype)
        return (torch.tanh(flat @ self.weight + shift) - self.bias * sigma[:, None] - 0.2 * flat).reshape(x.shape)


def prompts_of(count: int) -> list[Prompt]:
    """Prompts whose ids are neither ordered nor dense."""
    return [Prompt(id=(7 * i + 5) % 23 + 100 * (i % 2), text=f"prompt {i}") for i in range(count)]


def condition_of(count: int, latent: Sequence[int] = LATENT) -> TensorCondition:
    generator = torch.Generator().manual_seed(3)
    return TensorCondition({"shift": torch.randn(count, math.prod(latent), generator=generator, dtype=torch.float64)})


def options_of(iteration: int = 0, reduction: Reduction = Reduction.MEAN) -> dict:
    """Keyword arguments of ``Implementation.rollout`` in float64."""
    return {
        "latent_shape": LATENT,
        "dtype": torch.float64,
        "storage_dtype": torch.float64,
        "reduction": reduction,
        "iteration": iteration,
    }


def close(found: Tensor, expected: Tensor, tolerance: float = ROUNDING) -> bool:
    """Whether the difference's norm is within ``tolerance`` of the expected tensor's."""
    difference, size = float((found - expected).norm()), float(expected.norm())
    return found.shape == expected.shape and difference <= tolerance * size


def all_close(found: Sequence[Tensor | None], expected: Sequence[Tensor | None], tolerance: float = ROUNDING) -> bool:
    """``close`` for every entry; None only where None is expected."""
    pairs = zip(found, expected, strict=True)
    return all(
        (a is None and b is None) or (a is not None and b is not None and close(a, b, tolerance)) for a, b in pairs
    )


def same_objective(found: Tensor, expected: Tensor, advantages: Sequence[Tensor]) -> bool:
    """Equal to 1e-12 of the largest |A|: J is a mean of terms of that size, which may cancel to much less."""
    scale = max(float(level.abs().max()) for level in advantages)
    return abs(float(found.detach() - expected.detach())) <= ROUNDING * scale


def gradients(model: nn.Module, value: Tensor) -> Tensor:
    """All parameter gradients of a value, in one vector."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))])


def accumulated(model: nn.Module) -> Tensor:
    """The gradients that a model holds, in one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def rewards_of(plan: Plan, prompts: int, models: int, seed: int, *, ties: bool = False) -> Tensor:
    """Rewards ``[prompts, R·N, models]``; with ties, multiples of a half."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(prompts, plan.roots * plan.leaves, models, generator=generator, dtype=torch.float64)
    return torch.round(rewards) / 2 if ties else rewards


def preset_plan(name: str, iteration: int = 0) -> Plan:
    """The plan of a preset that is not a family."""
    plan = preset(name).plan_at(iteration, seed=0)
    assert isinstance(plan, Plan)
    return plan


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any small plan: T in 1..5, K in 1..3, every kernel, at most 24 leaves and 3 roots."""
    steps = draw(st.integers(1, 5))
    output = draw(st.sampled_from(list(LeafOutput)))
    sigmas = shifted_schedule(steps, draw(st.sampled_from([0.7, 1.0, 3.0])))
    noisy = [Kernel(KernelKind.SDE, 0.3), Kernel(KernelKind.FLOW_SDE, 0.7), Kernel(KernelKind.CPS, 0.6)]
    kernels = draw(st.lists(st.sampled_from([ODE, *noisy]), min_size=steps, max_size=steps))
    last = steps - 1 if output is LeafOutput.DENOISED else steps
    branching, leaves = [], 1
    for i, kernel in enumerate(kernels):
        may = i < last and kernel.is_stochastic(sigmas[i + 1])
        factor = draw(st.integers(1, 3)) if may and leaves <= 8 else 1
        branching.append(factor)
        leaves *= factor
    spreads = draw(st.lists(st.sampled_from([0.0, 0.5, 4.0, math.inf]), min_size=steps, max_size=steps))
    roots = draw(st.integers(1, 3))
    return Plan(sigmas, tuple(kernels), tuple(branching), tuple(spreads), roots=roots, output=output)
