"""Size and power of the statistical checks, measured: many seeds of right code, many injections of what is detectable.

Resumable: every batch is written to the progress file, and a later run goes on where it stopped. The summary carries
the hash of the checks' code and the number of seeds that were really run.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from rich.console import Console
from scipy import stats

from branchgrpo.properties.budget import ALPHA
from branchgrpo.properties.checks import estimators, leaves, noise, singular
from branchgrpo.properties.findings import Finding
from branchgrpo.properties.fingerprint import source_hash
from branchgrpo.properties.loading import load_object, load_subject
from branchgrpo.properties.statistics.anderson import anderson_test
from branchgrpo.properties.statistics.correlation import correlation_test
from branchgrpo.properties.statistics.ks import ks_test
from branchgrpo.properties.statistics.mean import mean_test
from branchgrpo.properties.statistics.moments import heavy_tailed, kurtosis_test, skewed, skewness_test
from branchgrpo.properties.statistics.outcome import Outcome
from branchgrpo.properties.statistics.variance import variance_test
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import Kernel, KernelKind

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "spec" / "studies" / "calibration.json"
PROGRESS = ROOT / "runs" / "calibration" / "progress.json"
SUBJECT = "branchgrpo.conformance.adapters.optimized:OptimizedImplementation"
FAST_NOISE = "branchgrpo.optimized.philox:PhiloxNoise"

N = 10_000
SIZE_SEEDS, POWER_SEEDS, RUNS = 1000, 3000, 200
SPREAD_RHO = 1.0 / 17.0

Array = Float64[np.ndarray, "n"]
Rows = dict[str, float]


@dataclass(frozen=True)
class Study:
    """One thing to repeat.

    Attributes:
        name: of the study.
        kind: ``size`` (p-values of right samples) or ``power`` (whether the injected discrepancy was found).
        target: repetitions.
        run: seed → a number a row: p, in both kinds.
        whole: whether it is a check of a property run, through an implementation.
    """

    name: str
    kind: str
    target: int
    run: Callable[[int], Rows]
    whole: bool = False


def flipped(x: Array, delta: float) -> Array:
    """Positive draws turned over so that P(x < 0) = ½ + δ."""
    return np.where((x > 0) & (np.modf(np.abs(x) * 1e4)[0] < 2.0 * delta), -x, x)


def scaled(x: Array, delta: float) -> Array:
    """Variance 1 + δ."""
    return np.asarray(x * np.sqrt(1.0 + delta))


def shifted(x: Array, delta: float) -> Array:
    """Mean δ."""
    return np.asarray(x + delta)


SINGLE: dict[str, tuple[Callable[[Array], Outcome], Callable[[Array, float], Array]]] = {
    "mean": (mean_test, shifted),
    "variance": (variance_test, scaled),
    "KS": (ks_test, flipped),
    "Anderson–Darling": (anderson_test, shifted),
    "skewness": (skewness_test, skewed),
    "kurtosis": (kurtosis_test, heavy_tailed),
}


def single_studies() -> Iterator[Study]:
    """Every test of one sample: size, and power against its own detectable discrepancy, in both directions."""
    for name, (test, inject) in SINGLE.items():

        def size(seed: int, test: Callable[[Array], Outcome] = test) -> Rows:
            return {"p": test(np.random.default_rng(seed).standard_normal(N)).p}

        yield Study(f"{name} test", "size", SIZE_SEEDS, size)
        for sign in (1.0,) if name == "KS" else (1.0, -1.0):

            def power(
                seed: int,
                test: Callable[[Array], Outcome] = test,
                inject: Callable[[Array, float], Array] = inject,
                sign: float = sign,
            ) -> Rows:
                x = np.random.default_rng(10**6 + seed).standard_normal(N)
                return {"p": test(inject(x, sign * test(x).detectable)).p}

            yield Study(f"{name} test, {'+' if sign > 0 else '−'}", "power", POWER_SEEDS, power)


def correlated(seed: int, rho: float) -> tuple[Array, Array]:
    """Pairs with a correlation."""
    x, y = np.random.default_rng(seed).standard_normal((2, N))
    return x, np.asarray(rho * x + np.sqrt(1.0 - rho * rho) * y)


def pair_studies() -> Iterator[Study]:
    """The correlation test at 0 and at the published spread's 1/17."""
    for rho in (0.0, SPREAD_RHO):
        name = f"correlation test, ρ = {rho:.4g}"

        def size(seed: int, rho: float = rho) -> Rows:
            return {"p": correlation_test(*correlated(seed, rho), rho).p}

        yield Study(name, "size", SIZE_SEEDS, size)
        for sign in (1.0, -1.0):

            def power(seed: int, rho: float = rho, sign: float = sign) -> Rows:
                delta = correlation_test(*correlated(0, rho), rho).detectable
                return {"p": correlation_test(*correlated(10**6 + seed, rho + sign * delta), rho).p}

            yield Study(f"{name}, {'+' if sign > 0 else '−'}", "power", POWER_SEEDS, power)


def check_studies() -> Iterator[Study]:
    """The checks as they run in a property run, at reduced size, through the implementation: size alone."""
    subject, source = load_subject(SUBJECT), load_object(FAST_NOISE)
    assert callable(source)
    sde = Kernel(KernelKind.SDE, 0.3)
    tree = tree_plan(8, sde, splits=(0, 3), branching=2, spread=4.0)
    pair = tree_plan(4, Kernel(KernelKind.SDE, 0.6), splits=(0, 1), branching=2, spread=2.0)
    family = PlanFamily(shifted_schedule(8), Kernel(KernelKind.FLOW_SDE, 0.7), (0, 2), group=2, granularities=(1, 2))
    checks: dict[str, Callable[[int], list[Finding]]] = {
        "branch noise": lambda seed: noise.branch_noise_findings(
            subject, source(seed), "", size=500, dtype=torch.float64
        ),
        "leaves": lambda seed: leaves.leaf_findings(subject, tree, source(seed), "", 200, whole_law=True),
        "children of plan families": lambda seed: singular.child_law(subject, family, source(seed), 200),
        "uniform fusion": lambda seed: estimators.fusion_statistics(subject, pair, source(seed), 200, ""),
        "gradient estimators": lambda seed: [
            estimators.estimator_statistic(subject, pair, source(seed), baseline, 200, "")
            for baseline in estimators.BASELINES
        ],
    }
    for name, check in checks.items():
        yield Study(name, "size", SIZE_SEEDS, partial(p_values, check), whole=True)


def p_values(check: Callable[[int], list[Finding]], seed: int) -> Rows:
    """p of every finding by its name."""
    return {finding.name: finding.p for finding in check(seed) if finding.p is not None}


def studies() -> list[Study]:
    """All of them."""
    return [*single_studies(), *pair_studies(), *check_studies()]


class Progress:
    """p-values by study and row, kept on disk under the hash of the checks' code."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hash = source_hash()
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.values: dict[str, dict[str, list[float]]] = stored["values"] if stored.get("hash") == self.hash else {}

    def done(self, study: Study) -> int:
        """Repetitions so far."""
        return min((len(v) for v in self.values.get(key(study), {}).values()), default=0)

    def add(self, study: Study, seed: int) -> None:
        """One repetition."""
        own = self.values.setdefault(key(study), {})
        for name, p in study.run(seed).items():
            own.setdefault(name, []).append(float(p))

    def save(self) -> None:
        """Write everything, then put it in place."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps({"hash": self.hash, "values": self.values}), encoding="utf-8")
        draft.replace(self.path)


def key(study: Study) -> str:
    """Name of a study in the progress file."""
    return f"{study.kind}: {study.name}"


def size_row(name: str, p: list[float], target: int) -> dict[str, Any]:
    """Uniformity of p under right code; super-uniform p pass, too many small ones do not."""
    test = stats.kstest(p, "uniform")
    below = stats.kstest(p, "uniform", alternative="greater")
    share = {f"share_below_{level:g}": float(np.mean(np.array(p) <= level)) for level in (0.05, 0.01)}
    tests = {"p_uniform": float(test.pvalue), "p_not_too_small": float(below.pvalue)}
    return {"check": name, "seeds": len(p), "target": target, "smallest_p": min(p), **share, **tests}


def power_row(name: str, p: list[float], target: int) -> dict[str, Any]:
    """Misses at the level of the run, and the power that they rule out: Clopper–Pearson, 99 %."""
    missed = int(np.sum(np.array(p) > ALPHA))
    upper = float(stats.beta.ppf(0.995, missed + 1, len(p) - missed))
    lower = float(stats.beta.ppf(0.005, missed, len(p) - missed + 1)) if missed else 0.0
    interval = {"power_low": 1.0 - upper, "power_high": 1.0 - lower}
    return {"check": name, "seeds": len(p), "target": target, "missed": missed, **interval}


def summary(progress: Progress, plan: list[Study]) -> dict[str, Any]:
    """What was found, with the honest number of seeds of every row."""
    found: dict[str, list[dict[str, Any]]] = {"size": [], "power": []}
    for study in plan:
        for name, p in progress.values.get(key(study), {}).items():
            title = study.name if name == "p" else f"{study.name}: {name.removeprefix('optimized').strip(', ')}"
            row = size_row if study.kind == "size" else power_row
            found[study.kind].append(row(title, p, study.target))
    whole = [study for study in plan if study.whole]
    runs = min(RUNS, *(progress.done(study) for study in whole))
    every = [p for study in whole for p in progress.values.get(key(study), {}).values()]
    alarms = sum(any(p[seed] <= ALPHA for p in every) for seed in range(runs))
    return {
        "source_hash": progress.hash,
        "alpha": ALPHA,
        "n": N,
        "runs": {"seeds": runs, "target": RUNS, "alarms": alarms},
        **found,
    }


def calibrate(minutes: float, progress: Progress, plan: list[Study], console: Console) -> None:
    """Batches of ten seeds of one study after the other, until all have their target or the time is up."""
    end, saved = time.monotonic() + 60.0 * minutes, time.monotonic()
    pending = {key(s): s for s in plan if progress.done(s) < s.target}
    for name in itertools.chain.from_iterable(iter(lambda: list(pending), [])):
        if time.monotonic() > end:
            break
        study = pending.get(name)
        if study is None:
            continue
        first = progress.done(study)
        for seed in range(first, min(first + 10, study.target)):
            progress.add(study, seed)
        if progress.done(study) >= study.target:
            console.print(f"{name}: {study.target} seeds")
            del pending[name]
        if time.monotonic() - saved > 20.0:
            progress.save()
            saved = time.monotonic()
    progress.save()


def main() -> None:
    """Calibrate for a while and write the summary."""
    parser = argparse.ArgumentParser(description="Size and power of the statistical checks.")
    parser.add_argument("--minutes", type=float, default=85.0, help="stop after this long; run again to go on")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="summary, JSON")
    parser.add_argument("--progress", type=Path, default=PROGRESS, help="p-values so far, JSON")
    arguments = parser.parse_args()
    console, progress, plan = Console(), Progress(arguments.progress), studies()
    calibrate(arguments.minutes, progress, plan, console)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary(progress, plan), indent=1, ensure_ascii=False)
    arguments.output.write_text(text + "\n", encoding="utf-8")
    left = sum(max(0, s.target - progress.done(s)) for s in plan)
    console.print(f"{arguments.output}: {'complete' if left == 0 else f'{left} repetitions left, run again'}")


if __name__ == "__main__":
    main()
