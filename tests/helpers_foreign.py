"""Faults planted in copies of examples/foreign, and what the checks say of each.

    python tests/helpers_foreign.py RESULT.json [NAME …]

A process of its own: the checks of shapes at run time would make it several times slower. Without names all faults, and
before them the code as it is, on every case; a fault is judged on the cases that show it.
"""

import importlib
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from branchgrpo.conformance.cases import all_cases
from branchgrpo.conformance.checks.base import OPERATION_CHECKS, Subject
from branchgrpo.conformance.judge import judge, record_case
from branchgrpo.conformance.runner import run_check, run_trace_checks

ROOT = Path(__file__).resolve().parents[1]
FILES = ("grove", "grove_update", "adapter")


@dataclass(frozen=True)
class Fault:
    """One change away from right.

    Attributes:
        file: in examples/foreign.
        old, new: the text that is replaced.
        clauses: all of them have to fail.
        cases: that it is driven through, beside the operation checks of these clauses.
    """

    file: str
    old: str
    new: str
    clauses: frozenset[str]
    cases: tuple[str, ...] = ()


def fault(file: str, old: str, new: str, clauses: str, cases: str = "") -> Fault:
    """A fault from words."""
    return Fault(file, old, new, frozenset(clauses.split()), tuple(cases.split()))


FAULTS = {
    "g at the child's level": fault(
        "grove",
        "eta * math.sqrt(self.s / below)",
        "eta * math.sqrt(max(self.t, 0.01) / below)",
        "KERN-3 KERN-5",
        "weighted",
    ),
    "std without the root of delta": fault("grove", "g * math.sqrt(delta)", "g", "KERN-5", "tree"),
    "drift without a half": fault("grove", "g * g * delta / (2.0 * self.s)", "g * g * delta / self.s", "KERN-3"),
    "shared noise across parents": fault(
        "grove", "dice.shared(node.depth, node.slot)", "dice.shared(node.depth, 0)", "NOISE-3"
    ),
    "private noise across siblings": fault(
        "grove",
        "dice.private(node.depth + 1, node.slot * count + b)",
        "dice.private(node.depth + 1, node.slot * count)",
        "NOISE-1 NOISE-3",
        "noise-sde",
    ),
    "private noise of another sibling": fault(
        "grove",
        "dice.private(node.depth + 1, node.slot * count + b)",
        "dice.private(node.depth + 1, node.slot * count + count - 1 - b)",
        "NOISE-3",
    ),
    "shares of the noise swapped": fault(
        "grove", "(1.0 / h) * shared + (spread / h) * own", "(spread / h) * shared + (1.0 / h) * own", "NOISE-2", ""
    ),
    "mean rounded before the noise": fault(
        "grove", "x = (mu + hop.std * xi).to(keep)", "x = (mu.to(keep).to(mu.dtype) + hop.std * xi).to(keep)", "ROLL-5"
    ),
    "log-probability before rounding": fault(
        "grove", "gauss(x, mu, hop.std, how)", "gauss(mu + hop.std * xi, mu, hop.std, how)", "LOGP-3", "bf16"
    ),
    "continuations between other levels": fault(
        "grove", "sigmas[path[n - 1]], sigmas[path[n]]", "sigmas[path[n - 1]], sigmas[path[n]] ** 1.1", "SING-1"
    ),
    "a path's last edge alone": fault(
        "grove_update",
        "s + (0.0 if kid.lp is None else float(kid.lp))",
        "s if kid.kids else (0.0 if kid.lp is None else float(kid.lp))",
        "FUSE-2 FUSE-3",
        "tree",
    ),
    "child softmax of one generation": fault(
        "grove_update",
        "for s in shares(kid, kind, beta)]",
        "for s in [1.0 / len(kid.leaves())] * len(kid.leaves())]",
        "FUSE-4",
        "child-softmax",
    ),
    "population for Bessel": fault(
        "grove_update", "(len(width_of) - bool(bessel))", "len(width_of)", "NORM-3 NORM-1", "tree"
    ),
    "std about the other mean": fault(
        "grove_update", "math.fsum((n - centre) ** 2", "math.fsum((n - middle) ** 2", "NORM-3", "roots"
    ),
    "the batch ends at the prompt": fault(
        "grove_update", '"batch": batch}', '"batch": prompt}', "NORM-2 NORM-1", "roots"
    ),
    "advantages through float32": fault(
        "grove_update",
        "[(n - middle) / (width + eps) for n in numbers]",
        "[float(np.float32((n - middle) / (width + eps))) for n in numbers]",
        "NORM-1 NORM-3 NORM-7",
        "tree",
    ),
    "the worse child stays": fault(
        "grove_update", "key=lambda i: (-keys[i], i)", "key=lambda i: (keys[i], i)", "PRUNE-3", "parent-top1"
    ),
    "windows move an iteration early": fault(
        "grove_update", "min(iteration // rule.period", "min((iteration + 1) // rule.period", "PRUNE-5", "depth-down-29"
    ),
    "windows a depth too long": fault(
        "grove_update",
        "range(first, first + rule.size)",
        "range(first, first + rule.size + 1)",
        "PRUNE-5",
        "depth-down-0",
    ),
    "pruned edges are trained": fault(
        "grove_update", "[kid for kid in node.kids if kid.kept]", "list(node.kids)", "PRUNE-6 OBJ-3", "parent-top1"
    ),
    "inverted ratio": fault(
        "grove_update",
        "torch.exp(gauss(kid.x, mu, hop.std, how) - float(kid.lp))",
        "torch.exp(float(kid.lp) - gauss(kid.x, mu, hop.std, how))",
        "OBJ-1 OBJ-2",
    ),
    "clip range swapped": fault(
        "grove_update", "rho.clamp(1 - low, 1 + high)", "rho.clamp(1 - high, 1 + low)", "OBJ-2"
    ),
    "KL without a half": fault("grove_update", "/ (2.0 * hop.std**2)", "/ hop.std**2", "OBJ-5"),
    "std weights over all steps": fault(
        "grove_update",
        "typical = math.fsum(live.values()) / len(live)",
        "typical = math.fsum(h.std for h in trees[0][1]) / len(trees[0][1])",
        "OBJ-6",
    ),
    "J is a sum over trees": fault(
        "grove_update", "torch.stack(parts).mean()", "torch.stack(parts).sum()", "OBJ-7 OBJ-4", "tree"
    ),
    "the last edge is trained": fault(
        "adapter", "set(plan.trainable_steps)\n", "set(plan.stochastic_steps)\n", "PLAN-6", "sample"
    ),
    "the KL is weighted": fault(
        "grove_update", "/ (2.0 * hop.std**2)", "/ (2.0 * hop.std**2) * weight(node.depth)", "OBJ-5"
    ),
    "granularities are clipped one by one": fault(
        "adapter",
        "total = raw if total is None else total + raw",
        "raw = raw.clamp(-options.clip, options.clip); total = raw if total is None else total + raw",
        "GRAN-5",
    ),
    "subsets of another role": fault(
        "grove_update", "PRIVATE, SUBSET, WINDOW = range(5)", "PRIVATE, WINDOW, SUBSET = range(5)", "PLAN-7"
    ),
    "subsets without the root": fault("grove_update", "(depth << 32) + root, node]", "(depth << 32), node]", "PLAN-7"),
    "chains train one more step": fault(
        "grove_update", "math.floor(fraction", "1 + math.floor(fraction", "PLAN-7", "fraction"
    ),
}
"""Chosen from the mathematics, before the checks were read; those that no check saw then are why some checks exist."""


def planted(folder: Path, chosen: Fault | None) -> object:
    """The adapter of a copy of the example, with a fault or without, imported from a folder."""
    target = folder / "examples" / "foreign"
    target.mkdir(parents=True)
    for file in FILES:
        source = (ROOT / "examples" / "foreign" / f"{file}.py").read_text(encoding="utf-8")
        if chosen is not None and file == chosen.file:
            assert chosen.old in source, chosen.old
            source = source.replace(chosen.old, chosen.new)
        (target / f"{file}.py").write_text(source, encoding="utf-8")
    for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        adapter = importlib.import_module("examples.foreign.adapter")
        assert str(adapter.__file__).startswith(str(folder))
        return adapter.Grove()
    finally:
        sys.path.remove(str(folder))


def failed(chosen: Fault) -> dict[str, str]:
    """Clauses that fail on the fault's cases and on the operation checks of its clauses, with the first message."""
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(planted(Path(folder), chosen))
        results = [run_check(check, subject) for check in OPERATION_CHECKS if check.clause in chosen.clauses]
        records = [record for case in chosen.cases for record in record_case(subject, all_cases()[case])]
    results += run_trace_checks(records) if records else []
    found: dict[str, str] = {}
    for result in results:
        if result.status == "failed":
            found.setdefault(result.clause, result.detail)
    return found


def main() -> None:
    """Judge what the arguments name and write what failed, by name; the code as it is under ``right``."""
    target, names = Path(sys.argv[1]), sys.argv[2:]
    found: dict[str, object] = {}
    if not names:
        with tempfile.TemporaryDirectory() as folder:
            found["right"] = judge(Subject(planted(Path(folder), None))).statuses()
    for name in names or FAULTS:
        found[name] = failed(FAULTS[name])
    target.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
