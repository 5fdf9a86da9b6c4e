"""The operations on plans, options and keys alone, answered by the reference."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from branchgrpo.conformance.codec import RULES, decode_options, decode_plan, decode_rule, encode, integer, real
from branchgrpo.conformance.vectors.cases import Case
from branchgrpo.conformance.vectors.decode import decode_family
from branchgrpo.reference.counts import count_family, count_plan
from branchgrpo.reference.depth_window import window_at
from branchgrpo.reference.granularity import granular_indices
from branchgrpo.reference.kernels import plan_stds
from branchgrpo.reference.keys import keyed_generator
from branchgrpo.reference.options import DepthWindow, Fusion, Normalization, Objective
from branchgrpo.reference.plan import branching_from_splits
from branchgrpo.reference.protocols import NoiseRole
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.surrogate import step_weights
from branchgrpo.reference.types import Kernel
from branchgrpo.reference.windows import WindowedPlan, WindowSchedule, window_steps

KINDS: dict[str, type[Any]] = {
    "kernel": Kernel,
    "fusion": Fusion,
    "normalization": Normalization,
    "objective": Objective,
    "window": WindowSchedule,
    **RULES,
}
"""Options by the name that a vector gives them."""
COUNTS = ("steps", "leaves", "nodes", "edges", "denoiser_calls", "kept_edges", "kept_parents", "trained_edges",
          "trained_parents")  # fmt: skip
FAMILY_COUNTS = ("calls_public", "calls_shared", "calls_shared_stopped_anchor")


def schedule(case: Case) -> dict[str, Any]:
    """Levels of a shifted schedule."""
    steps, shift = integer(case.arguments["steps"], "steps"), real(case.arguments["shift"], "shift")
    return {"sigmas": list(shifted_schedule(steps, shift))}


def splits(case: Case) -> dict[str, Any]:
    """Branching factors of a set of split steps."""
    a = case.arguments
    steps = [integer(step, f"splits[{i}]") for i, step in enumerate(a["splits"])]
    return {"branching": list(branching_from_splits(a["steps"], steps, a["factor"]))}


def plan(case: Case) -> dict[str, Any]:
    """What follows from a plan alone."""
    found = decode_plan(case.arguments["plan"])
    return {
        "deltas": list(found.deltas),
        "level_sizes": list(found.level_sizes),
        "kernels": [kernel.kind.value for kernel in found.effective_kernels],
        "stds": list(plan_stds(found)),
        "splits": list(found.splits),
        "stochastic_steps": list(found.stochastic_steps),
        "trainable_steps": list(found.trainable_steps),
    }


def options(case: Case) -> dict[str, Any]:
    """Options that are accepted, as they are kept."""
    kind = KINDS[case.arguments["kind"]]
    return {"options": encode(decode_options(kind, case.arguments["options"], case.arguments["kind"]))}


def noise(case: Case) -> dict[str, Any]:
    """The counter and first words of a key, and its draw; numbers that may not fit 53 bits are decimal strings."""
    a = case.arguments
    key = [int(a[name]) for name in ("seed", "iteration")]
    place = [int(a[name]) for name in ("prompt", "root", "depth", "node")]
    make: Callable[[], np.random.Generator] = lambda: keyed_generator(key[0], key[1], NoiseRole(a["role"]), *place)  # noqa: E731
    generator = make()
    words = [str(int(word)) for word in generator.bit_generator.random_raw(4)]
    return {"words": words, "draw": make().standard_normal(tuple(a["shape"]))}


def window(case: Case) -> dict[str, Any]:
    """First steps of all positions, and the window of an iteration."""
    a = case.arguments
    moving = decode_options(WindowSchedule, a["window"], "window")
    return {"starts": list(moving.starts), "steps": list(window_steps(moving, a["iteration"], a["seed"]))}


def windowed_plan(case: Case) -> dict[str, Any]:
    """The plan of an iteration."""
    a = case.arguments
    moving = decode_options(WindowSchedule, a["window"], "window")
    return {"plan": encode(WindowedPlan(decode_plan(a["plan"]), moving, a["group"]).at(a["iteration"], a["seed"]))}


def depth_window(case: Case) -> dict[str, Any]:
    """Child depths that a depth window drops."""
    a = case.arguments
    rule = decode_options(DepthWindow, a["rule"], "depth_window")
    return {"depths": list(window_at(rule, a["steps"], a["iteration"]))}


def indices(case: Case) -> dict[str, Any]:
    """Indices that a continuation visits."""
    a = case.arguments
    granularity = integer(a["granularity"], "granularity")
    return {"indices": list(granular_indices(a["start"], a["steps"], granularity, a["anchor"]))}


def family(case: Case) -> dict[str, Any]:
    """The members of a plan family: indices into the full schedule, and the plan."""
    found = decode_family(case.arguments["family"])
    members = [
        {"k": k, "granularity": g, "indices": list(found.continuation(k, g)), "plan": encode(found.member(k, g))}
        for k, g in found.members()
    ]
    return {"members": members}


def counts(case: Case) -> dict[str, Any]:
    """What a prompt costs."""
    a = case.arguments
    if "family" in a:
        counted = asdict(count_family(decode_family(a["family"])))
        return {name: counted[name] for name in (*COUNTS, *FAMILY_COUNTS)}
    rules = tuple(decode_rule(rule, f"rules[{i}]") for i, rule in enumerate(a["rules"]))
    counted = asdict(count_plan(decode_plan(a["plan"]), rules, a["iteration"]))
    return {name: counted[name] for name in COUNTS}


def weights(case: Case) -> dict[str, Any]:
    """Edge weights of the trained steps, in their order."""
    a = case.arguments
    found = step_weights(dict(enumerate(a["stds"])), a["weighting"])
    return {"weights": [found[i] for i in range(len(a["stds"]))]}


class ReferenceParts:
    """What the reference says of plans, options and keys: no operation of the protocol, all the others."""

    name = "branchgrpo.reference, plans, options and keys"
    spec_version = "1.0"
    capabilities: frozenset[str] = frozenset()
    vector_operations: Mapping[str, Callable[[Case], dict[str, Any]]] = {
        "schedule": schedule,
        "splits": splits,
        "plan": plan,
        "options": options,
        "noise": noise,
        "window": window,
        "windowed_plan": windowed_plan,
        "depth_window": depth_window,
        "granular_indices": indices,
        "family": family,
        "counts": counts,
        "step_weights": weights,
    }
