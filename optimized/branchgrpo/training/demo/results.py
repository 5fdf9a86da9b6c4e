"""What the demo measured, and whether it is enough."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = 1
JUDGE_BASE = 0.98
JUDGE_DROP = 0.01
GAIN_IN_SD = 3.0
CALLS_SPREAD = 0.01
SECONDS = 360.0
CORES = 2


@dataclass(frozen=True)
class Point:
    """One evaluation: after so many denoiser calls and seconds of training, mean reward and judged accuracy."""

    calls: int
    seconds: float
    reward: float
    judge: float


@dataclass(frozen=True)
class Run:
    """One method trained with one seed.

    Attributes:
        method, seed: which run.
        iterations, updates: rollouts made, optimiser steps taken.
        rollout_calls, update_calls: denoiser calls of each phase.
        seconds: wall time of training, evaluations left out.
        curve: evaluations, the first before training, the last after it.
    """

    method: str
    seed: int
    iterations: int
    updates: int
    rollout_calls: int
    update_calls: int
    seconds: float
    curve: tuple[Point, ...]

    @property
    def calls(self) -> int:
        """Denoiser calls in all."""
        return self.rollout_calls + self.update_calls

    def summary(self) -> dict[str, Any]:
        """The run as JSON data, with its gain."""
        first, last = self.curve[0], self.curve[-1]
        return {
            **asdict(self),
            "calls": self.calls,
            "base_reward": first.reward,
            "final_reward": last.reward,
            "gain": last.reward - first.reward,
            "judge_base": first.judge,
            "judge_final": last.judge,
        }


def sample_sd(values: Sequence[float]) -> float | None:
    """Standard deviation with Bessel's correction; None of fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One method's runs: mean and standard deviation of the gain, the judge's mean accuracy before and after."""
    gains = [run["final_reward"] - run["base_reward"] for run in runs]
    return {
        "mean_gain": statistics.fmean(gains),
        "sd_gain": sample_sd(gains),
        "mean_base_reward": statistics.fmean(run["base_reward"] for run in runs),
        "mean_final_reward": statistics.fmean(run["final_reward"] for run in runs),
        "mean_judge_base": statistics.fmean(run["judge_base"] for run in runs),
        "mean_judge_final": statistics.fmean(run["judge_final"] for run in runs),
        "mean_seconds": statistics.fmean(run["seconds"] for run in runs),
    }


@dataclass(frozen=True)
class Criterion:
    """One condition: what was measured, what is required, and whether it holds."""

    name: str
    method: str
    value: float | None
    required: str
    passed: bool


def method_criteria(method: str, runs: Sequence[Mapping[str, Any]]) -> list[Criterion]:
    """Gain against its spread over seeds, and the judge's accuracy of base and of the worst run."""
    summary = summarise(runs)
    mean, sd = summary["mean_gain"], summary["sd_gain"]
    base, drop = min(run["judge_base"] for run in runs), max(run["judge_base"] - run["judge_final"] for run in runs)
    in_sd = mean / sd if sd else None  # without a spread there is no ratio, but any gain is enough
    enough = sd is not None and mean > 0 and mean >= GAIN_IN_SD * sd
    room = 1e-9  # accuracies are counts divided by counts: float64 rounding, far below one sample
    return [
        Criterion("gain in standard deviations of the seeds", method, in_sd, f"≥ {GAIN_IN_SD:g}", enough),
        Criterion("judge's accuracy, base model", method, base, f"≥ {JUDGE_BASE:g}", base >= JUDGE_BASE - room),
        Criterion("judge's accuracy lost, worst seed", method, drop, f"≤ {JUDGE_DROP:g}", drop <= JUDGE_DROP + room),
    ]


def seconds_alone(seconds: Mapping[str, float]) -> float:
    """Seconds that the demo takes on two cores of its own.

    Wall time; on a machine that was busy with other things, the processor time that was used, shared by two cores.
    """
    return min(seconds["total"], seconds.get("processor", math.inf) / CORES)


def acceptance(runs: Mapping[str, Sequence[Mapping[str, Any]]], seconds: Mapping[str, float]) -> list[Criterion]:
    """All conditions, from the runs themselves.

    Args:
        runs: summaries of the runs, by method.
        seconds: of the whole demo: ``total`` wall time and, where known, ``processor`` time.
    """
    criteria = [criterion for method, own in runs.items() for criterion in method_criteria(method, own)]
    calls = [run["calls"] for own in runs.values() for run in own]
    spread, within = max(calls) / min(calls) - 1.0, f"≤ {CALLS_SPREAD:g}"
    equal = max(calls) <= (1.0 + CALLS_SPREAD) * min(calls)
    criteria.append(Criterion("spread of total denoiser calls", "all", spread, within, equal))
    alone = seconds_alone(seconds)
    criteria.append(Criterion("seconds on two cores", "all", alone, f"≤ {SECONDS:g}", alone <= SECONDS))
    return criteria


def results_document(
    runs: Sequence[Run], counts: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of ``results.json``.

    Args:
        runs: every run.
        counts: a method's label, plan counts and settings.
        config: the demo's configuration as JSON data.
        facts: ``seconds`` (see ``acceptance``), and the ``environment``.
    """
    by_method = {m: [run.summary() for run in runs if run.method == m] for m in counts}
    methods = {m: {**counts[m], **summarise(by_method[m]), "runs": by_method[m]} for m in counts}
    criteria = acceptance(by_method, facts["seconds"])
    verdict = {"passed": all(c.passed for c in criteria), "criteria": [asdict(c) for c in criteria]}
    return {"schema": SCHEMA, "config": dict(config), "methods": methods, "acceptance": verdict, **facts}
