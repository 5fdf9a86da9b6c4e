"""Thresholds: which numbers of an iteration go beyond theirs, what that means, and what to do about it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from branchgrpo.reference.errors import BranchGRPOError
from branchgrpo.training.config.schema import Limit, MonitorsConfig

Level = Literal["warn", "stop"]


@dataclass(frozen=True)
class Monitor:
    """What a limit watches.

    Attributes:
        keys: the numbers that it is applied to, those that an iteration has.
        side: ``above`` the threshold is bad, or ``below``.
        title: for people.
        advice: what it means and what to do about it.
    """

    keys: tuple[str, ...]
    side: Literal["above", "below"]
    title: str
    advice: str


MONITORS: Mapping[str, Monitor] = {
    "log_prob_drift": Monitor(
        ("log_prob_drift",),
        "above",
        "rollout–training drift",
        "Rollout and training disagree before any update, so every ratio is wrong from the start. Check dtype and "
        "storage_dtype, guidance in training, dropout, and kernels whose result depends on the batch (rollout.pad).",
    ),
    "clip_fraction": Monitor(
        ("clip_fraction",),
        "above",
        "clipped ratios",
        "Most edges are outside the clip range and teach nothing more: lower the learning rate or inner_epochs, or "
        "check that the clip range fits the log-probability's reduction (mean or sum).",
    ),
    "kl": Monitor(
        ("kl",),
        "above",
        "KL to the reference",
        "The policy moves far from the one it started from; samples may lose what pretraining taught. Raise "
        "objective.kl, lower the learning rate, or stop at an earlier checkpoint.",
    ),
    "advantage_spread": Monitor(
        ("advantage_spread",),
        "below",
        "smallest advantage spread of a depth",
        "All nodes of a depth have nearly the same advantage, so its edges are trained on rounding. Look at the "
        "rewards' spread, at fusion.beta, and at the splits above that depth.",
    ),
    "reward_spread": Monitor(
        ("reward_spread",),
        "below",
        "reward spread within a tree",
        "Leaves of one tree get the same reward: there is nothing to prefer. Check that the reward sees differences "
        "(resolution, saturation), or sample with more noise (eta) or earlier splits.",
    ),
    "effective_sample_size": Monitor(
        ("effective_sample_size",),
        "below",
        "effective sample size of path weights",
        "One leaf decides the value of its whole tree, so fused rewards are as noisy as single samples. Lower "
        "fusion.beta, or use log_prob = mean: sums grow with the latent's size.",
    ),
    "degenerate_groups": Monitor(
        ("degenerate_groups",),
        "above",
        "degenerate groups",
        "Many groups have equal rewards in all leaves and are skipped. Leave out prompts that are always or never "
        "solved, use a finer reward, or larger groups.",
    ),
    "gradient_norm": Monitor(
        ("gradient_norm",),
        "above",
        "gradient norm before clipping",
        "Clipping hides gradients this large, and their direction is then one batch's accident. Check the drift and "
        "the ratios, lower the learning rate, or warm it up.",
    ),
    "diversity": Monitor(
        ("diversity", "evaluation/diversity"),
        "below",
        "diversity of a tree's leaves, first iteration = 1",
        "Samples of one prompt become alike: the policy collapses onto what the reward likes. Stop earlier, raise "
        "objective.kl, or add a reward that asks for something else.",
    ),
    "reward_gap": Monitor(
        ("reward_gap",),
        "above",
        "trained against held-out rewards",
        "The trained reward rises and the held-out one does not follow: the reward is probably being hacked. Look at "
        "the sample grids, stop at an earlier checkpoint, raise objective.kl, or train on both rewards.",
    ),
}
"""A monitor for every limit of the configuration, by the limit's name."""


BROKEN = (
    "Training has broken down. Go back to a checkpoint, and look for overflow in a low precision, a learning rate that "
    "is too large, or a reward without bounds."
)
"""What to do about a number that is not finite."""


@dataclass(frozen=True)
class Finding:
    """One number beyond its threshold.

    Attributes:
        monitor: name of the limit.
        key: the number's name.
        level: ``warn``, or ``stop``: the run must end.
        value: what was measured.
        threshold: that it went beyond; None for a value that is not finite, which is beyond every one.
        text: one line for people: what was measured, what it means, what to do.
    """

    monitor: str
    key: str
    level: Level
    value: float
    threshold: float | None
    text: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for the log."""
        return {
            "monitor": self.monitor,
            "key": self.key,
            "level": self.level,
            "value": self.value,
            "threshold": self.threshold,
            "text": self.text,
        }


class MonitorStop(BranchGRPOError):
    """A monitor went beyond the threshold that ends the run."""

    @property
    def finite(self) -> bool:
        """Whether the number was finite: if not, what the run holds now cannot be trusted."""
        return isinstance(self.value, float) and math.isfinite(self.value)


def beyond(value: float, threshold: float | None, side: str) -> bool:
    """Whether a value is on the bad side; equal is not, and without a threshold nothing is."""
    return threshold is not None and (value > threshold if side == "above" else value < threshold)


def judge_one(name: str, key: str, value: float, limit: Limit) -> Finding | None:
    """The finding about one number; NaN and ±∞ are one whatever the thresholds, and end the run."""
    monitor = MONITORS[name]
    if not math.isfinite(value):
        text = f"{monitor.title} ({key}) is {value}. {BROKEN}"
        return Finding(name, key, "stop", value, None, text)
    levels: tuple[tuple[Level, float | None], ...] = (("stop", limit.stop), ("warn", limit.warn))
    for level, threshold in levels:
        if threshold is not None and beyond(value, threshold, monitor.side):
            text = f"{monitor.title} ({key}) is {value:.4g}, {monitor.side} {threshold:g}. {monitor.advice}"
            return Finding(name, key, level, value, threshold, text)
    return None


def judge(metrics: Mapping[str, float], config: MonitorsConfig) -> list[Finding]:
    """The findings of one iteration or evaluation: at most one a number, the more severe one.

    Args:
        metrics: over all ranks, so that all of them find the same.
        config: a limit a monitor.
    """
    found = (
        judge_one(name, key, metrics[key], getattr(config, name))
        for name, monitor in MONITORS.items()
        for key in monitor.keys
        if key in metrics
    )
    return [finding for finding in found if finding is not None]


def stop_if_asked(findings: list[Finding], iteration: int) -> None:
    """Raise the first finding that ends the run.

    Raises:
        MonitorStop: names monitor, value, threshold and advice.
    """
    for finding in findings:
        if finding.level == "stop":
            side = MONITORS[finding.monitor].side
            legal = (
                "finite"
                if finding.threshold is None
                else f"not {side} {finding.threshold:g} (monitors.{finding.monitor}.stop)"
            )
            advice = BROKEN if finding.threshold is None else MONITORS[finding.monitor].advice
            raise MonitorStop(f"{finding.key} at iteration {iteration}", finding.value, f"{legal}. {advice}")
