"""Numbers behind ``spec/findings.md`` that the oracle's studies do not hold, stored in ``spec/studies/findings.json``.

``python benchmarks/finding_studies.py`` rewrites the file in seconds. All but ``rounding`` are exact; that study is
a seeded simulation of what rounding a child after it was scored does to its ratio.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from branchgrpo.conformance.audit.precision import rounding_rows
from branchgrpo.conformance.checks.levels import expected_stds
from branchgrpo.oracle.chain import Chain, affine_chain
from branchgrpo.oracle.covariance import leaf_covariance
from branchgrpo.oracle.gaussian import GaussianData
from branchgrpo.oracle.laws import given_node, leaf_law, random_root
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.presets import DENSE, LATE, preset
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput

DATA = GaussianData(0.7, 0.5)
KERNELS = {"dance": Kernel(KernelKind.SDE, 0.3), "flow": Kernel(KernelKind.FLOW_SDE, 0.7)}
SPLITS = {"dense": DENSE, "late": LATE}
SCALE = 4.0
Row = dict[str, Any]


def plan_of(kernel: str, splits: str, spread: float = 4.0) -> Plan:
    """T = 20, shift 3, K = 2, every step stochastic, the leaf as sampled."""
    return tree_plan(20, KERNELS[kernel], splits=SPLITS[splits], branching=2, spread=spread, output=LeafOutput.SAMPLE)


def scaled_branch_noise() -> list[Row]:
    """Variance of z at a split and of a leaf if branch noise is scaled by 4 and its parts are independent (DIV-B1)."""
    rows = []
    for kernel in KERNELS:
        for splits in SPLITS:
            plan = plan_of(kernel, splits)
            chain = affine_chain(plan, DATA)
            scale = np.array([SCALE if i in plan.splits else 1.0 for i in range(plan.steps)])
            scaled = Chain(chain.alpha, chain.shift, chain.response, chain.std * scale)
            right, wrong = (leaf_law(c, random_root())[1] for c in (chain, scaled))
            row = {"kernel": kernel, "splits": splits, "z_variance": SCALE**2, "leaf_variance": right}
            rows.append({**row, "scaled_leaf_variance": wrong, "ratio": wrong / right})
    return rows


def leaf_correlations() -> list[Row]:
    """Correlation of two leaves that part at the first and at the last split, root drawn and root given."""
    rows = []
    for kernel in KERNELS:
        for splits in SPLITS:
            for spread in (1.0, 4.0, math.inf):
                plan = plan_of(kernel, splits, spread)
                chain = affine_chain(plan, DATA)
                row: Row = {"kernel": kernel, "splits": splits, "spread": "inf" if math.isinf(spread) else spread}
                for name, start in (("drawn", random_root()), ("given", given_node(np.zeros(1)))):
                    variance = leaf_law(chain, start)[1]
                    for which, depth in (("first", plan.splits[0]), ("last", plan.splits[-1])):
                        row[f"{name}_{which}"] = leaf_covariance(plan, chain, start, depth) / variance
                rows.append(row)
    return rows


def advantage_bound() -> list[Row]:
    """Largest |A| that a group of n can have, (n − 1)/√n, one reward of weight 1 (NORM-7)."""
    return [
        {"n": n, "bound": (n - 1) / math.sqrt(n), "binds": (n - 1) / math.sqrt(n) > 5} for n in (2, 12, 16, 24, 26, 27)
    ]


def levels_left() -> list[Row]:
    """Noise levels next to the end of a 16-step schedule with shift 3: where public continuations stop (DIV-G1)."""
    sigmas = shifted_schedule(16)
    return [{"steps_left": left, "sigma": sigmas[16 - left]} for left in (0, 1, 2)]


def rounding() -> list[Row]:
    """|ρ − 1| of unchanged weights over the steps of the preset, children scored before they are rounded (DIV-B2)."""
    plan = preset("branchgrpo").sampler
    assert isinstance(plan, Plan)
    return rounding_rows(sorted({round(std, 12) for std in expected_stds(plan) if std > 0}))


STUDIES = {
    "scaled_branch_noise": scaled_branch_noise,
    "leaf_correlations": leaf_correlations,
    "advantage_bound": advantage_bound,
    "levels_left": levels_left,
    "rounding": rounding,
}


def tidy(value: Any) -> Any:
    """Floats to ten digits."""
    if isinstance(value, dict):
        return {key: tidy(part) for key, part in value.items()}
    return float(f"{value:.10g}") if isinstance(value, float) else value


def run() -> dict[str, Any]:
    """All studies, as stored."""
    return {"schema": 1, "studies": {name: [tidy(row) for row in make()] for name, make in STUDIES.items()}}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).resolve().parents[1] / "spec" / "studies" / "findings.json"
    parser.add_argument("--out", type=Path, default=default, help="file to write (default: spec/studies/findings.json)")
    options = parser.parse_args()
    options.out.write_text(json.dumps(run(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
