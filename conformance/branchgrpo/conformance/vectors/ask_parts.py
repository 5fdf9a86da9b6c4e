"""Vectors of schedules, plans, options, keys and windows."""

import math
from dataclasses import replace
from typing import Any

from branchgrpo.conformance.codec import encode
from branchgrpo.conformance.vectors.ask import CPS, FLOW, SDE, case
from branchgrpo.conformance.vectors.ask_options import option_sets
from branchgrpo.conformance.vectors.cases import Case
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.options import DepthWindow
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput
from branchgrpo.reference.windows import WindowSchedule

TREE = tree_plan(5, SDE, splits=(0, 2), branching=2, spread=4.0)
SAMPLE = tree_plan(5, SDE, splits=(0, 2), branching=2, spread=1.0, output=LeafOutput.SAMPLE)


def schedules() -> list[Case]:
    """Shifted schedules."""
    good = [(1, 1.0), (1, 3.0), (2, 3.0), (4, 1.0), (4, 3.0), (5, 0.5), (10, 3.0), (16, 3.0), (20, 3.0), (25, 3.0),
            (28, 3.0), (50, 1.15), (20, 12.0)]  # fmt: skip
    bad = {
        "no-step": (0, 3.0, "steps"),
        "negative-steps": (-4, 3.0, "steps"),
        "half-a-step": (2.5, 3.0, "steps"),
        "shift-zero": (4, 0.0, "shift"),
        "shift-negative": (4, -3.0, "shift"),
        "shift-infinite": (4, "inf", "shift"),
    }
    made = [
        case("schedule", f"{t}-shift-{s:g}".replace(".", "_"), "SCHED-2", f"T = {t}, shift {s:g}",
             arguments={"steps": t, "shift": s}, tolerance="exact")
        for t, s in good
    ]  # fmt: skip
    for slug, (t, s, field) in bad.items():
        made.append(case("schedule", slug, "SCHED-2 ERR-2", f"T = {t}, shift {s}",
                         arguments={"steps": t, "shift": s}, error=field))  # fmt: skip
    return made


def split_sets() -> list[Case]:
    """Sets of split steps."""
    good = {
        "none": (4, [], 2),
        "first": (4, [0], 3),
        "last": (4, [3], 2),
        "all": (3, [0, 1, 2], 2),
        "dense": (20, [0, 3, 6, 9], 2),
        "late": (20, [9, 12, 15, 18], 2),
        "unsorted": (6, [4, 1], 4),
    }
    bad = {
        "twice": (4, [0, 0], "splits[1]", "named once"),
        "beyond-the-end": (4, [99], "splits[0]", "never clamped"),
        "at-the-end": (4, [1, 4], "splits[1]", "T is no step"),
        "negative": (4, [-1], "splits[0]", "never counted from the end"),
        "fraction": (4, [0, 1.5], "splits[1]", "an integer"),
    }
    made = [
        case("splits", slug, "PLAN-2", f"B = {b} of T = {t}, K = {k}",
             arguments={"steps": t, "splits": b, "factor": k}, tolerance="exact")
        for slug, (t, b, k) in good.items()
    ]  # fmt: skip
    for slug, (t, b, field, why) in bad.items():
        made.append(case("splits", slug, "PLAN-2 ERR-2", f"B = {b} of T = {t}: {why}",
                         arguments={"steps": t, "splits": b, "factor": 2}, error=field))  # fmt: skip
    return made


def good_plans() -> dict[str, tuple[str, Plan]]:
    """Plans and the clause that each shows."""
    four = (1.0, 0.9, 0.75, 0.5, 0.0)
    every = tuple(Kernel(KernelKind.SDE, eta) for eta in (0.3, 0.0, 0.5, 0.3))
    return {
        "tree": ("PLAN-1", TREE),
        "sample": ("PLAN-6", SAMPLE),
        "dense": ("PLAN-4", tree_plan(20, SDE, splits=(0, 3, 6, 9), branching=2, spread=4.0)),
        "flow": ("KERN-3", tree_plan(4, FLOW, splits=(0,), branching=3)),
        "cps": ("KERN-4", tree_plan(4, CPS, splits=(1,), branching=2)),
        "cps-sample": ("KERN-5", tree_plan(4, CPS, output=LeafOutput.SAMPLE)),
        "one-step": ("PLAN-6", tree_plan(1, SDE)),
        "one-step-sample": ("PLAN-6", tree_plan(1, SDE, splits=(0,), branching=2, output=LeafOutput.SAMPLE)),
        "eta-zero": ("KERN-5", Plan(four, every, (2, 1, 3, 1), (4.0, 0.0, math.inf, 1.0))),
        "mixed": ("KERN-5", tree_plan(6, SDE, splits=(1,), branching=2, sde_steps=(3, 4))),
        "trained": ("PLAN-6", tree_plan(6, SDE, splits=(0,), branching=2, trained_steps=(1, 3))),
        "fraction": ("PLAN-7", tree_plan(6, SDE, splits=(0,), branching=4, trained_fraction=0.5)),
        "roots": ("PLAN-1", tree_plan(3, FLOW, roots=4)),
        "flow-sample": ("KERN-3", tree_plan(5, FLOW, splits=(4,), branching=2, output=LeafOutput.SAMPLE)),
    }


def bad_plans() -> dict[str, tuple[str, dict[str, Any], str, str]]:
    """What a plan is changed to, the field at fault and why."""
    s, kernel = TREE.sigmas, {"kind": "sde", "eta": 0.3}
    return {
        "starts-below-1": ("SCHED-1", {"sigmas": [0.9, *s[1:]]}, "sigmas[0]", "exactly 1"),
        "stops-above-0": ("SCHED-1", {"sigmas": [*s[:-1], 0.1]}, "sigmas[5]", "exactly 0"),
        "equal-levels": ("SCHED-1", {"sigmas": [*s[:2], s[1], *s[3:]]}, "sigmas[2]", "strictly decreasing"),
        "rising-levels": ("SCHED-1", {"sigmas": [s[0], s[2], s[1], *s[3:]]}, "sigmas[2]", "strictly decreasing"),
        "one-level": ("SCHED-1", {"sigmas": [1.0]}, "sigmas", "two levels at least"),
        "kernel-missing": ("PLAN-1", {"kernels": [kernel] * 4}, "len(kernels)", "one a step"),
        "branching-too-long": ("PLAN-1", {"branching": [2, 1, 2, 1, 1, 1]}, "len(branching)", "one a step"),
        "spread-missing": ("PLAN-1", {"spreads": [1.0] * 4}, "len(spreads)", "one a step"),
        "no-root": ("PLAN-1", {"roots": 0}, "roots", "at least one"),
        "no-child": ("PLAN-3", {"branching": [2, 0, 2, 1, 1]}, "branching[1]", "at least one child"),
        "half-a-child": ("PLAN-3", {"branching": [2, 1.5, 2, 1, 1]}, "branching[1]", "an integer"),
        "split-at-denoised-end": ("PLAN-6", {"branching": [2, 1, 2, 1, 2]}, "branching[4]", "the last step is an ODE"),
        "split-at-ode": (
            "PLAN-3",
            {"kernels": [{"kind": "ode", "eta": 0.0}, *[kernel] * 4]},
            "branching[0]",
            "a split needs noise",
        ),
        "split-at-eta-0": (
            "PLAN-3",
            {"kernels": [*[kernel] * 2, {"kind": "sde", "eta": 0.0}, *[kernel] * 2]},
            "branching[2]",
            "a split needs noise",
        ),
        "split-at-cps-end": (
            "KERN-5",
            {"kernels": [{"kind": "cps", "eta": 0.5}] * 5, "branching": [1, 1, 1, 1, 2], "output": "sample"},
            "branching[4]",
            "CPS into 0 is deterministic",
        ),
        "spread-negative": ("PLAN-3", {"spreads": [1.0, -1.0, 1.0, 1.0, 1.0]}, "spreads[1]", "also where K is 1"),
        "eta-negative": ("ERR-2", {"kernels": [{"kind": "sde", "eta": -0.3}] * 5}, "kernel.eta", "at least 0"),
        "eta-infinite": ("ERR-2", {"kernels": [{"kind": "sde", "eta": "inf"}] * 5}, "kernel.eta", "finite"),
        "cps-eta-above-1": ("ERR-2", {"kernels": [{"kind": "cps", "eta": 1.5}] * 5}, "kernel.eta", "at most 1"),
        "ode-eta": ("KERN-2", {"kernels": [{"kind": "ode", "eta": 0.1}] * 5}, "kernel.eta", "0 and nothing else"),
        "unknown-kernel": ("ERR-5", {"kernels": [{"kind": "ddim", "eta": 0.1}] * 5}, "kernels[0].kind", "a known one"),
        "unknown-output": ("ERR-5", {"output": "latent"}, "output", "sample or denoised"),
        "trained-twice": ("PLAN-6", {"trained_steps": [1, 1]}, "trained_steps[1]", "named once"),
        "last-trained": ("PLAN-6", {"trained_steps": [0, 4]}, "trained_steps[1]", "its noise changes no reward"),
        "fraction-0": ("PLAN-7", {"trained_fraction": 0.0}, "trained_fraction", "above 0"),
        "fraction-of-nothing": (
            "PLAN-7",
            {"kernels": [{"kind": "ode", "eta": 0.0}] * 5, "branching": [1] * 5, "trained_fraction": 0.5},
            "trained_fraction",
            "no step is trainable",
        ),
        "fraction-of-shared-edges": ("PLAN-7", {"trained_fraction": 0.5}, "trained_fraction", "chains share edges"),
    }


def plans() -> list[Case]:
    """Plans that are allowed, and plans that are not."""
    made = [
        case("plan", slug, clause, "what follows from the plan alone", arguments={"plan": encode(p)})
        for slug, (clause, p) in good_plans().items()
    ]
    for slug, (clause, change, field, why) in bad_plans().items():
        arguments = {"plan": {**encode(TREE), **change}}
        clauses = clause if clause == "ERR-2" else f"{clause} ERR-2"
        made.append(case("plan", slug, clauses, why, arguments=arguments, error=field))
    return made


def depth_windows() -> list[Case]:
    """Where depth windows are."""
    paper, up = DepthWindow(10), DepthWindow(15, 4, 30, -1, 9)
    cut, wide = DepthWindow(18, 4, 30, -1, 1), DepthWindow(1, 30, stop=None, direction=-1)
    at = {"paper": (paper, (0, 29, 30, 60, 210, 9999)), "up": (up, (0, 30, 180, 9999)), "cut": (cut, (0, 30, 60))}
    made = [
        case("depth_window", f"{name}-{t}", "PRUNE-5", f"T = 20, iteration {t}", tolerance="exact",
             arguments={"rule": encode(rule), "steps": 20, "iteration": t})
        for name, (rule, times) in {**at, "all": (wide, (0,))}.items() for t in times
    ]  # fmt: skip
    bad = {
        "start-beyond-the-end": (DepthWindow(9), 4, 0, "depth_window.start"),
        "stop-beyond-the-end": (DepthWindow(1, 2, stop=9), 4, 0, "depth_window.stop"),
        "past-its-stop": (DepthWindow(3, 4), 4, 0, "depth_window.stop"),
        "iteration-negative": (paper, 20, -1, "iteration"),
    }
    for slug, (rule, steps, t, field) in bad.items():
        made.append(case("depth_window", slug, "PRUNE-5 ERR-2", f"refused at T = {steps}, iteration {t}",
                         arguments={"rule": encode(rule), "steps": steps, "iteration": t}, error=field))  # fmt: skip
    return made


def windows() -> list[Case]:
    """Windows over the iterations: every order, decay and end."""
    base = WindowSchedule(4, 10, 3, 25)
    kinds = {
        "progressive": (base, "WIN-4", (0, 24, 25, 74, 75, 100)),
        "wrap": (replace(base, end="wrap"), "WIN-4", (100, 125, 200)),
        "stop": (replace(base, end="stop"), "WIN-4", (99, 100)),
        "linear": (replace(base, decay="linear"), "WIN-5", (24, 25, 43, 54, 62)),
        "exponential": (replace(base, decay="exponential", rate=0.3, threshold=2), "WIN-5", (25, 44, 52, 60)),
        "half-to-even": (WindowSchedule(2, 3, 2, 5, decay="linear"), "WIN-5", (4, 5, 7)),
        "random": (replace(base, order="random", period=2), "WIN-6", (0, 1, 2, 4, 6, 8, 200)),
    }
    made = [
        case("window", f"{name}-{t}", clause, f"iteration {t}", tolerance="exact",
             arguments={"window": encode(schedule), "iteration": t, "seed": 7})
        for name, (schedule, clause, times) in kinds.items() for t in times
    ]  # fmt: skip
    negative = {"window": encode(base), "iteration": -1, "seed": 7}
    made.append(case("window", "iteration-negative", "WIN-1 ERR-2", "before the run", arguments=negative,
                     error="iteration"))  # fmt: skip
    return made


def windowed_plans() -> list[Case]:
    """Plans that move with a window."""
    mixed, flat = tree_plan(8, SDE, splits=(0, 3), branching=2, spread=2.0), tree_plan(8, FLOW)
    named = tree_plan(8, SDE, trained_steps=(1, 2, 6))
    mix, group = WindowSchedule(2, 6, 2, 5), WindowSchedule(3, 6, 3, 5, end="wrap")
    good = {
        **{f"mix-{t}": (mixed, mix, 1, t) for t in (0, 5, 15, 100)},
        **{f"group-{t}": (flat, group, 3, t) for t in (0, 5, 14, 15)},
        "stopped-beside-splits": (mixed, replace(mix, end="stop"), 1, 1000),
        "named-steps-rest": (named, WindowSchedule(3, 6, 2, 5), 1, 0),
    }
    made = [
        case("windowed_plan", slug, "WIN-1 WIN-3", f"iteration {t}", tolerance="exact",
             arguments={"plan": encode(p), "window": encode(w), "group": g, "iteration": t, "seed": 7})
        for slug, (p, w, g, t) in good.items()
    ]  # fmt: skip
    bad = {
        "group-beside-splits": (mixed, mix, 3, 0, "group", "WIN-3"),
        "last-is-not-trainable": (flat, WindowSchedule(3, 7), 3, 0, "window.last", "WIN-2"),
        "last-is-too-early": (flat, WindowSchedule(3, 5), 3, 0, "window.last", "WIN-2"),
        "window-of-ode-steps": (tree_plan(8, FLOW, sde_steps=(0, 1, 6)), mix, 1, 5, "window", "WIN-1"),
        "over-without-splits": (flat, replace(group, end="stop"), 1, 1000, "window", "WIN-1"),
    }
    for slug, (p, w, g, t, field, clause) in bad.items():
        arguments = {"plan": encode(p), "window": encode(w), "group": g, "iteration": t, "seed": 7}
        made.append(case("windowed_plan", slug, f"{clause} ERR-2", "refused", arguments=arguments, error=field))
    return made


def keys() -> list[Case]:
    """Keys of draws, their counters and numbers."""
    place = {"seed": "7", "iteration": "3", "role": "private", "prompt": "5", "root": "1", "depth": "4", "node": "6"}
    top = {"seed": str(2**64 - 1), "iteration": str(2**64 - 1), "prompt": str(2**63 - 1), "root": str(2**32 - 1),
           "depth": str(2**24 - 1), "node": str(2**63 - 1)}  # fmt: skip
    good = {
        "spec": {},
        **{f"role-{role}": {"role": role} for role in ("root", "shared", "subset", "window")},
        **{f"other-{name}": {name: "2"} for name in ("seed", "iteration", "prompt", "root", "depth", "node")},
        "zeros": dict.fromkeys(top, "0") | {"role": "root"},
        "largest": top,
    }
    made = [
        case("noise", slug, "NOISE-4", "words and draw of one key", tolerance="float64",
             arguments={**place, **change, "shape": [4]})
        for slug, change in good.items()
    ]  # fmt: skip
    made.append(case("noise", "long", "NOISE-4", "enough numbers to reach the tail of the ziggurat",
                     arguments={**place, "shape": [20, 32]}))  # fmt: skip
    bits = {"seed": 64, "iteration": 64, "prompt": 63, "root": 32, "depth": 24, "node": 63}
    for name, size in bits.items():
        made.append(case("noise", f"{name}-too-large", "NOISE-4", f"2^{size}", error=f"noise key {name}",
                         arguments={**place, name: str(2**size), "shape": [4]}))  # fmt: skip
    made.append(case("noise", "prompt-negative", "NOISE-4", "-1", error="noise key prompt",
                     arguments={**place, "prompt": "-1", "shape": [4]}))  # fmt: skip
    return made


def weights() -> list[Case]:
    """Edge weights of trained steps."""
    lists = {
        "spec": [0.3, 0.2, 0.1],
        "one": [0.7],
        "equal": [0.25, 0.25, 0.25],
        "wide": [1e-3, 1.0, 5.0, 0.5],
        "many": [0.05 * i for i in range(1, 20)],
        "flow": [1.5652475842498528, 0.33, 0.6062177826491071, 0.494974746830583],
    }
    return [
        case("step_weights", f"{slug}-{how}", "OBJ-6", f"{len(stds)} trained steps",
             arguments={"stds": stds, "weighting": how})
        for slug, stds in lists.items() for how in ("uniform", "std")
    ]  # fmt: skip


def parts() -> list[Case]:
    """All of them."""
    return [
        *schedules(), *split_sets(), *plans(), *option_sets(), *depth_windows(), *windows(), *windowed_plans(),
        *keys(), *weights(),
    ]  # fmt: skip
