"""Vectors of single steps: transitions, branch noise, log-probabilities."""

import math
from typing import Any

import numpy as np

from branchgrpo.conformance.codec import encode
from branchgrpo.conformance.vectors.ask import CPS, FLOW, SDE, case
from branchgrpo.conformance.vectors.cases import Case
from branchgrpo.conformance.vectors.inputs import numbers
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import ODE, Kernel, KernelKind, LeafOutput

SAMPLE = LeafOutput.SAMPLE


def step(slug: str, clauses: str, plan: Plan, at: int, latent: tuple[int, ...] = (4,), dtype: str = "float64") -> Case:
    """One step of a plan from three states."""
    shape = (3, *latent)
    return case(
        "transition", slug, clauses, f"step {at}, {plan.effective_kernels[at].kind.value}, {dtype}",
        arguments={"plan": encode(plan), "step": at, "dtype": dtype},
        inputs={"x": numbers(f"x {slug}", shape), "velocity": numbers(f"v {slug}", shape)},
        tolerance="float64" if dtype == "float64" else "float32",
    )  # fmt: skip


def transitions() -> list[Case]:
    """Every kernel at the first, a middle and the last step."""
    made = []
    kernels = {
        "ode": (ODE, "KERN-2"),
        "sde": (SDE, "KERN-3"),
        "sde-strong": (Kernel(KernelKind.SDE, 1.5), "KERN-3"),
        "flow": (FLOW, "KERN-3"),
        "cps": (CPS, "KERN-4"),
        "cps-full": (Kernel(KernelKind.CPS, 1.0), "KERN-4"),
    }
    for name, (kernel, clause) in kernels.items():
        plan = tree_plan(4, kernel, output=SAMPLE)
        made += [step(f"{name}-{at}", f"{clause} KERN-5", plan, at) for at in (0, 2, 3)]
    for name, kernel in {"sde": SDE, "flow": FLOW, "cps": CPS}.items():
        made.append(step(f"{name}-denoised", "PLAN-6 KERN-2", tree_plan(4, kernel), 3))
    made += [
        step("eta-zero", "KERN-5", tree_plan(4, Kernel(KernelKind.SDE, 0.0)), 1),
        step("cps-eta-zero", "KERN-5", tree_plan(4, Kernel(KernelKind.CPS, 0.0)), 1),
        step("spread-is-not-read", "KERN-5 LOGP-3", tree_plan(4, SDE, splits=(1,), branching=2, spread=4.0), 1),
        step("one-step", "KERN-2 PLAN-6", tree_plan(1, SDE), 0),
        step("one-step-flow", "KERN-3", tree_plan(2, FLOW, output=SAMPLE), 0),
        step("unshifted", "KERN-3", tree_plan(5, FLOW, shift=1.0), 2),
        step("image", "KERN-3", tree_plan(4, SDE), 1, (2, 2, 3)),
        step("float32", "KERN-6", tree_plan(4, SDE), 1, dtype="float32"),
        step("float32-flow", "KERN-6", tree_plan(4, FLOW), 0, (2, 3), "float32"),
        step("float32-cps", "KERN-6", tree_plan(4, CPS), 1, dtype="float32"),
    ]
    return made


def branching() -> list[Case]:
    """Branch noise over spreads, sizes and dtypes."""
    asked: dict[str, tuple[Any, int, int, tuple[int, ...], str]] = {
        "spec": (4.0, 1, 2, (2,), "float64"),
        "equal-siblings": (0.0, 2, 3, (4,), "float64"),
        "quarter": (0.25, 2, 2, (4,), "float64"),
        "one": (1.0, 3, 2, (4,), "float64"),
        "two": (2.0, 2, 4, (4,), "float64"),
        "eight": (8.0, 2, 2, (2, 3), "float64"),
        "tiny": (1e-200, 1, 2, (4,), "float64"),
        "huge": (1e200, 2, 2, (4,), "float64"),
        "largest": (1.7976931348623157e308, 1, 2, (4,), "float64"),
        "infinite": ("inf", 2, 2, (4,), "float64"),
        "infinite-float32": ("inf", 2, 3, (4,), "float32"),
        "float32": (4.0, 2, 2, (2, 3), "float32"),
        "many": (1.0, 4, 4, (1,), "float64"),
    }
    made = []
    for slug, (spread, parents, children, latent, dtype) in asked.items():
        inputs = {
            "shared": numbers(f"shared {slug}", (parents, *latent)),
            "private": numbers(f"private {slug}", (parents, children, *latent)),
        }
        made.append(
            case("branch_noise", slug, "NOISE-1 NOISE-2", f"s = {spread}, K = {children}", inputs=inputs,
                 arguments={"spread": spread, "dtype": dtype},
                 tolerance="float64" if dtype == "float64" else "float32")
        )  # fmt: skip
    return made


def log_probabilities() -> list[Case]:
    """Log-probabilities over reductions, sizes, stds and dtypes; float32 and bf16 inputs are widened first."""
    asked: dict[str, tuple[float, str, tuple[int, ...], str, str]] = {
        "sum": (0.2, "sum", (2,), "float64", "float64"),
        "mean": (0.2, "mean", (2,), "float64", "float64"),
        "one-element": (0.5, "mean", (1,), "float64", "float64"),
        "image-sum": (0.7, "sum", (2, 3, 4), "float64", "float64"),
        "image-mean": (0.7, "mean", (2, 3, 4), "float64", "float64"),
        "narrow": (0.001, "sum", (4,), "float64", "float64"),
        "wide": (12.5, "mean", (4,), "float64", "float64"),
        "std-one": (1.0, "sum", (4,), "float64", "float64"),
        "float32": (0.3, "sum", (64,), "float32", "float32"),
        "float32-mean": (0.3, "mean", (64,), "float32", "float32"),
        "bfloat16-child": (0.3, "sum", (16,), "float32", "bfloat16"),
        "bfloat16-child-mean": (0.3, "mean", (16,), "float64", "bfloat16"),
    }
    made = []
    for slug, (std, reduction, latent, dtype, storage) in asked.items():
        inputs = {
            "child": numbers(f"child {slug}", (3, *latent)),
            "mean": numbers(f"mean {slug}", (3, *latent)) + (2.0**-20 if dtype == "float32" else 0.0),
        }
        clauses = "LOGP-5 LOGP-1" if dtype == "float32" else "LOGP-1 LOGP-2"
        made.append(
            case("log_probability", slug, clauses, f"{reduction} over {latent}, std {std}", inputs=inputs,
                 arguments={"std": std, "reduction": reduction, "dtype": dtype, "storage": storage})
        )  # fmt: skip
    same = numbers("at the mean", (3, 4))
    made.append(
        case("log_probability", "at-the-mean", "LOGP-1", "z = 0: constants alone", inputs={"child": same, "mean": same},
             arguments={"std": 1 / math.e, "reduction": "mean", "dtype": "float64", "storage": "float64"})
    )  # fmt: skip
    far = np.full((3, 4), 1000.0)
    made.append(
        case("log_probability", "far-away", "LOGP-1", "z = 5000", inputs={"child": far, "mean": np.zeros((3, 4))},
             arguments={"std": 0.2, "reduction": "sum", "dtype": "float64", "storage": "float64"})
    )  # fmt: skip
    return made


def steps() -> list[Case]:
    """All of them."""
    return [*transitions(), *branching(), *log_probabilities()]
