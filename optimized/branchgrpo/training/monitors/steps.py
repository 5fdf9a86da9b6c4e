"""What an iteration's updates say: ratios, clipping, KL and gradient norms, from their statistics."""

import math
from collections.abc import Sequence

from branchgrpo.optimized.update import UpdateStats
from branchgrpo.reference.errors import InputError


def drift(stats: Sequence[UpdateStats]) -> float:
    """Largest |log ρ| of the given accumulations; ∞ where a ratio is 0, NaN where one is NaN.

    Clause: LOGP-4.  Before the first optimiser step the policy is the one that sampled, so this is 0 to rounding.
    """
    logs = []
    for s in stats:
        for ratio in (s.ratio_min, s.ratio_max):
            logs.append(abs(math.log(ratio)) if ratio > 0.0 and math.isfinite(ratio) else abs(ratio) or math.inf)
    return math.nan if any(math.isnan(value) for value in logs) else max(logs)


def update_metrics(
    updates: Sequence[UpdateStats], gradient_norms: Sequence[float], learning_rate: float
) -> dict[str, float]:
    """Numbers of one iteration's updates.

    ``log_prob_drift``: of the first step, largest |log ρ|; ``clip_fraction``, ``ratio/mean``: over all edges of all
    steps; ``ratio/min``, ``ratio/max``; ``kl``, ``objective``: mean over steps; ``gradient_norm``: largest, before
    clipping; ``edges_trained``, ``update_calls``: edges and denoiser calls of all steps; ``learning_rate``.

    Args:
        updates: over all ranks; one a step of the optimiser, or the same number of accumulated parts for each step.
        gradient_norms: one a step, before clipping.
        learning_rate: of the last step.

    Raises:
        InputError: no steps, or a number of updates that is not a multiple of theirs.
    """
    steps = len(gradient_norms)
    if steps == 0 or len(updates) % steps or not updates:
        raise InputError("len(updates)", len(updates), f"a positive multiple of the number of steps, {steps}")
    edges = sum(s.edges for s in updates)
    shares = [s.edges / edges if edges else math.nan for s in updates]
    return {
        "log_prob_drift": drift(updates[: len(updates) // steps]),
        "clip_fraction": math.fsum(w * s.clip_fraction for w, s in zip(shares, updates, strict=True)),
        "kl": math.fsum(s.kl for s in updates) / steps,
        "objective": math.fsum(s.objective for s in updates) / steps,
        "ratio/mean": math.fsum(w * s.ratio_mean for w, s in zip(shares, updates, strict=True)),
        "ratio/min": min(s.ratio_min for s in updates),
        "ratio/max": max(s.ratio_max for s in updates),
        "gradient_norm": math.nan if any(math.isnan(n) for n in gradient_norms) else max(gradient_norms),
        "edges_trained": float(edges),
        "update_calls": float(sum(s.parents for s in updates)),
        "learning_rate": learning_rate,
    }
