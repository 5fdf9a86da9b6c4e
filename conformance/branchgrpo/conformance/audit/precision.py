"""Stage: how far ratios stray from 1 with unchanged weights, against the clip range."""

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.conformance.audit.context import Context, Data
from branchgrpo.conformance.checks.levels import expected_stds
from branchgrpo.reference.types import Reduction

DTYPES = ("float32", "float16", "bfloat16")
DIMENSIONS = (256, 4096, 65_536)
DRAWS, SEED = 24, 0
CLIPS = (1e-4, 1e-3)


def drift_of_rounding(std: float, elements: int, dtype: str, seed: int = SEED) -> Float64[Tensor, "draws"]:
    """log ρ, summed, if a child is scored as sampled in float32 and stored in another dtype (DIV-B2).

    The mean is standard normal, the order of magnitude of latents.
    """
    generator = torch.Generator().manual_seed(seed)
    mean, xi = (torch.randn(DRAWS, elements, generator=generator, dtype=torch.float32) for _ in range(2))
    child = mean + std * xi
    stored = child.to(getattr(torch, dtype)).double()
    before, after = ((x - mean.double()) / std for x in (child.double(), stored))
    return (0.5 * (before.square() - after.square())).sum(dim=1)


def rounding_rows(stds: list[float]) -> list[Data]:
    """Median and largest |ρ − 1| over the steps of a plan, for dtypes, dimensions and both reductions."""
    rows = []
    for dtype in DTYPES:
        for elements in DIMENSIONS:
            logs = torch.cat([drift_of_rounding(std, elements, dtype) for std in stds])
            for reduction in Reduction:
                scaled = logs / elements if reduction is Reduction.MEAN else logs
                drift = torch.expm1(scaled.clamp(max=50.0)).abs()
                rows.append(
                    {
                        "dtype": dtype,
                        "D": elements,
                        "reduction": reduction.value,
                        "median": float(drift.median()),
                        "largest": float(drift.max()),
                        "beyond": {f"{clip:g}": float((drift > clip).double().mean()) for clip in CLIPS},
                    }
                )
    return rows


def precision_drift(context: Context) -> Data:
    """What rounding after scoring would do to the run's steps; the subject's own drift is in the stage ``run``."""
    plan = context.setting.plan()
    stds = sorted({round(std, 12) for std in expected_stds(plan) if std > 0})
    picked = [stds[i] for i in sorted({0, len(stds) // 2, len(stds) - 1})] if stds else []
    clip = context.setting.method.objective.clip_low
    return {"stds": picked, "rows": rounding_rows(picked) if picked else [], "clip": clip, "reasons": []}
