"""What is watched and kept: the tables ``[monitors]``, ``[evaluation]``, ``[checkpoint]`` and ``[logging]``."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from branchgrpo.reference.errors import OptionError
from branchgrpo.training.config.checks import check_flag, check_integer, check_name, check_number, check_text
from branchgrpo.training.config.policy_tables import SEEDS

Tracking = Literal["off", "offline", "online"]

BELOW = ("advantage_spread", "reward_spread", "effective_sample_size", "diversity")
"""Monitors that alarm when a value falls below the threshold; all others when it rises above."""


@dataclass(frozen=True)
class Limit:
    """Thresholds of one monitor: beyond ``warn`` a line in the log, beyond ``stop`` the end of the run; None never."""

    warn: float | None = None
    stop: float | None = None


@dataclass(frozen=True)
class MonitorsConfig:
    """``[monitors]``: a threshold each; the comments say what is compared, and in which direction.

    Attributes:
        log_prob_drift: largest |log ρ| of the first update after a rollout, above; 0 on policy.
        clip_fraction: share of clipped ratios, above.
        kl: to the frozen reference, above.
        advantage_spread: smallest std of a depth's advantages, below.
        reward_spread: std of the rewards within a tree, its mean over trees, below.
        effective_sample_size: of path weights at the roots over the leaves, 0 where one leaf has all, 1 where all share
            equally, below.
        degenerate_groups: share of trees whose rewards are all equal, above.
        gradient_norm: before clipping, above.
        diversity: mean distance of a tree's leaves over that of the first iteration's, below.
        reward_gap: rise of the trained reward less the rise of the held-out one, in standard deviations of the
            first evaluation, above: the alarm for reward hacking.
        costly_every: iterations between two measurements of what costs calls of its own (gradient norm a depth).
    """

    log_prob_drift: Limit = Limit(warn=1e-5, stop=None)
    clip_fraction: Limit = Limit(warn=0.5)
    kl: Limit = Limit(warn=1.0)
    advantage_spread: Limit = Limit(warn=1e-3)
    reward_spread: Limit = Limit(warn=1e-6)
    effective_sample_size: Limit = Limit(warn=0.05)
    degenerate_groups: Limit = Limit(warn=0.5)
    gradient_norm: Limit = Limit(warn=100.0)
    diversity: Limit = Limit(warn=0.3)
    reward_gap: Limit = Limit(warn=2.0)
    costly_every: int = 0

    def __post_init__(self) -> None:
        check_integer("monitors.costly_every", self.costly_every, 0)
        for item in fields(self):
            limit = getattr(self, item.name)
            if isinstance(limit, Limit):
                check_limit(f"monitors.{item.name}", limit, below=item.name in BELOW)


def check_limit(field: str, limit: Limit, *, below: bool) -> None:
    """Refuse thresholds that are negative, or in an order that would stop before it warns.

    Raises:
        OptionError: such thresholds.
    """
    for name in ("warn", "stop"):
        if getattr(limit, name) is not None:
            check_number(f"{field}.{name}", getattr(limit, name), 0.0)
    if limit.warn is None or limit.stop is None:
        return
    if limit.stop > limit.warn if below else limit.stop < limit.warn:
        raise OptionError(f"{field}.stop", limit.stop, f"{'≤' if below else '≥'} warn = {limit.warn:g}")


@dataclass(frozen=True)
class EvaluationConfig:
    """``[evaluation]``: deterministic samples of held-out prompts from noise that never changes.

    Attributes:
        every: iterations; 0 evaluates never.
        samples: a prompt.
        steps: of the ODE; 0 is the plan's number.
        seed: of the noise.
        grid: prompts in the sample grid that is saved; 0 saves none.
    """

    every: int = 50
    samples: int = 4
    steps: int = 0
    seed: int = 2024
    grid: int = 8

    def __post_init__(self) -> None:
        for name, low in (("every", 0), ("samples", 1), ("steps", 0), ("grid", 0)):
            check_integer(f"evaluation.{name}", getattr(self, name), low)
        check_integer("evaluation.seed", self.seed, 0, SEEDS)


@dataclass(frozen=True)
class CheckpointConfig:
    """``[checkpoint]``: everything needed to go on.

    Attributes:
        every: iterations; 0 saves at the end (or when interrupted) only.
        keep: newest checkpoints that stay; 0 keeps all.
        export: write a diffusers-loadable folder (or the digits network) at the end.
    """

    every: int = 25
    keep: int = 2
    export: bool = True

    def __post_init__(self) -> None:
        check_integer("checkpoint.every", self.every, 0)
        check_integer("checkpoint.keep", self.keep, 0)
        check_flag("checkpoint.export", self.export)


@dataclass(frozen=True)
class LoggingConfig:
    """``[logging]``: beside ``metrics.jsonl``, which is always written.

    Attributes:
        progress: a line with the time left on standard error.
        tensorboard: event files in the run's folder.
        wandb: Weights & Biases, if installed.
        wandb_project: its project.
        scores: every leaf's scores in ``scores.jsonl``.
    """

    progress: bool = True
    tensorboard: bool = False
    wandb: Tracking = "off"
    wandb_project: str = "branchgrpo"
    scores: bool = False

    def __post_init__(self) -> None:
        for name in ("progress", "tensorboard", "scores"):
            check_flag(f"logging.{name}", getattr(self, name))
        check_name("logging.wandb", self.wandb, get_args(Tracking))
        check_text("logging.wandb_project", self.wandb_project, empty=False)
