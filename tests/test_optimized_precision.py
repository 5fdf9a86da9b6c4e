"""Low precision: no worse than twice the reference's own error in the same precision, against float64."""

import pytest
import torch
from helpers_optimized import LATENT, SmallModel, condition_of, options_of, preset_plan, prompts_of, shapes_unchecked
from torch import Tensor

from branchgrpo.conformance.adapters.optimized import OptimizedImplementation
from branchgrpo.conformance.adapters.reference import ReferenceImplementation
from branchgrpo.reference.implementation import Trace
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import Objective
from branchgrpo.reference.protocols import Condition
from branchgrpo.reference.types import Reduction


class LowPrecision(SmallModel):
    """The small model, computed in another dtype, as a denoiser under autocast is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(1)
        self.compute = dtype

    def forward(self, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        flat = x.flatten(1).to(self.compute)
        shift = ((1.0 + sigma)[:, None] * condition.tensors["shift"]).to(self.compute)  # type: ignore[attr-defined]
        v = torch.tanh(flat @ self.weight.to(self.compute) + shift) - 0.2 * flat
        return v.reshape(x.shape)


def errors(trace: Trace, exact: Trace) -> tuple[float, float]:
    """Relative error of all states, and of all log-probabilities."""
    pairs = [
        list(zip(trace.states, exact.states, strict=True)),
        [(a, b) for a, b in zip(trace.log_probs, exact.log_probs, strict=True) if a is not None and b is not None],
    ]
    totals = []
    for group in pairs:
        difference = sum(float((a.double() - b.double()).square().sum()) for a, b in group)
        size = sum(float(b.double().square().sum()) for _, b in group)
        totals.append((difference / size) ** 0.5)
    return totals[0], totals[1]


@pytest.mark.parametrize(
    ("compute", "arithmetic", "storage"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
    ],
    ids=["fp32", "bf16 denoiser", "bf16 denoiser and storage"],
)
@shapes_unchecked()
def test_low_precision_is_no_worse_than_the_plain_path(
    compute: torch.dtype, arithmetic: torch.dtype, storage: torch.dtype
) -> None:
    plan, prompts, condition, noise = preset_plan("branchgrpo"), prompts_of(2), condition_of(2), KeyedNoise(3)
    reference, optimized = ReferenceImplementation(), OptimizedImplementation(chunk=13)
    exact_model = LowPrecision(torch.float64)
    exact = reference.rollout(plan, exact_model, prompts, condition, noise, **options_of(0, Reduction.SUM))
    options = {**options_of(0, Reduction.SUM), "dtype": arithmetic, "storage_dtype": storage}
    plain = reference.rollout(plan, LowPrecision(compute), prompts, condition, noise, **options)
    found = optimized.rollout(plan, LowPrecision(compute), prompts, condition, noise, **options)
    # The floor is one rounding of the arithmetic: what an error of 0 in the plain path could still turn into.
    floor = torch.finfo(arithmetic).eps
    for mine, theirs in zip(errors(found, exact), errors(plain, exact), strict=True):
        assert mine <= 2.0 * theirs + floor
    assert errors(found, exact)[0] > 0.0


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
@shapes_unchecked()
def test_on_policy_ratios_are_1_in_every_storage_dtype(storage: torch.dtype) -> None:
    """The old log-probability was taken at the stored child from the stored parent, so the update finds it again."""
    plan, prompts, condition, model = (
        preset_plan("branchgrpo"),
        prompts_of(2),
        condition_of(2),
        LowPrecision(torch.float32),
    )
    optimized = OptimizedImplementation(chunk=13)
    options = {**options_of(0, Reduction.MEAN), "dtype": torch.float32, "storage_dtype": storage}
    trace = optimized.rollout(plan, model, prompts, condition, KeyedNoise(3), **options)
    assert LATENT == (2, 3)
    ones = tuple(torch.ones(state.shape[:2], dtype=torch.float64) for state in trace.states)
    kept = tuple(torch.ones(state.shape[:2], dtype=torch.bool) for state in trace.states[1:])
    wide = Objective(clip_low=0.5, clip_high=0.5)
    value = optimized.objective([trace], model, condition, [ones], [kept], wide, Reduction.MEAN, None)
    # With A = 1 everywhere J is the mean ratio. A float32 velocity computed in another batch moves by 2⁻²³ or so, and
    # a mean log-probability by (x − μ)/std² times the mean's rounding, of either sign: 10⁻⁵ a term, less on average.
    assert abs(value.item() - 1.0) < 1e-5
