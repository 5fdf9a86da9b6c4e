"""What the demo runs: three published methods at a size for two CPU cores."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from branchgrpo.reference.errors import OptionError, is_integer
from branchgrpo.reference.method import Method
from branchgrpo.reference.presets import branchgrpo, dancegrpo, g2rpo
from branchgrpo.rewards.digits import DigitsRewardConfig
from branchgrpo.training.digits_classifier import ClassifierConfig
from branchgrpo.training.digits_generator import GeneratorConfig

STEPS = 16
SPLITS = (0, 2, 5, 7)
LABELS: Mapping[str, str] = MappingProxyType({"branchgrpo": "BranchGRPO", "dancegrpo": "flat GRPO", "g2rpo": "G²RPO"})
"""Method → its name in the report; "flat GRPO" is DanceGRPO's plan: one noise a prompt, chains that part at step 0."""


def demo_method(name: str) -> Method:
    """One of the three methods: its published settings, at T = 16 and with 16 leaves (G²RPO keeps its group of 12).

    Raises:
        OptionError: a name that the demo does not run.
    """
    if name == "branchgrpo":
        return branchgrpo(name, steps=STEPS, splits=SPLITS)
    if name == "dancegrpo":
        return dancegrpo(name, steps=STEPS, group=16)
    if name == "g2rpo":
        return g2rpo(name, steps=STEPS)
    raise OptionError("method", name, f"one of {list(LABELS)}")


@dataclass(frozen=True)
class Tuning:
    """Optimiser of one method: learning rate of AdamW, and the prompts of one iteration."""

    learning_rate: float
    prompts: int = 10

    def __post_init__(self) -> None:
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise OptionError("tuning.learning_rate", self.learning_rate, "finite and > 0")
        if not is_integer(self.prompts) or not 1 <= self.prompts <= 10:
            raise OptionError("tuning.prompts", self.prompts, "an integer in 1..10")


DEFAULT_TUNING: Mapping[str, Tuning] = MappingProxyType({name: Tuning(1.5e-4) for name in LABELS})


@dataclass(frozen=True)
class DemoConfig:
    """Everything that the demo's numbers depend on, apart from the machine's speed.

    Attributes:
        seeds: runs a method; run i has seed i.
        calls: budget of denoiser calls of a run, rollout and update together.
        evaluations: evaluations during a run, beside the one before it; evenly spaced in calls.
        samples: samples a digit in an evaluation.
        evaluation_seed: seed of the evaluation's noise: the same for every method, run and moment.
        workers: processes; each computes with one thread, so the results do not depend on it.
        tuning: optimiser settings a method.
        reward: target and factors of the reward.
        generator, classifier: pretraining.
    """

    seeds: int = 3
    calls: int = 240_000
    evaluations: int = 10
    samples: int = 200
    evaluation_seed: int = 2024
    workers: int = 2
    tuning: Mapping[str, Tuning] = field(default_factory=lambda: dict(DEFAULT_TUNING))
    reward: DigitsRewardConfig = field(default_factory=DigitsRewardConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    classifier: ClassifierConfig = field(default_factory=ClassifierConfig)

    def __post_init__(self) -> None:
        for name, low in (("seeds", 1), ("calls", 1), ("evaluations", 1), ("samples", 1), ("workers", 1)):
            if not is_integer(getattr(self, name)) or getattr(self, name) < low:
                raise OptionError(f"demo.{name}", getattr(self, name), f"an integer ≥ {low}")
        if set(self.tuning) != set(LABELS):
            raise OptionError("demo.tuning", sorted(self.tuning), f"one entry for each of {list(LABELS)}")


def quick_config() -> DemoConfig:
    """A run of seconds, for tests: one seed, a few iterations, a small network; no claim about its gains."""
    base = DemoConfig()
    return replace(
        base,
        seeds=1,
        calls=15_000,
        evaluations=3,
        samples=10,
        workers=1,
        generator=replace(base.generator, steps=300, batch=128),
        classifier=replace(base.classifier, channels=8, steps=100),
    )
