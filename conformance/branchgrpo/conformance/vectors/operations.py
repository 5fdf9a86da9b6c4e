"""The operations of an implementation, driven by vectors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from branchgrpo.conformance.codec import decode_options, decode_plan, decode_rule, real, reals
from branchgrpo.conformance.vectors.cases import Case
from branchgrpo.conformance.vectors.decode import (
    DTYPES,
    as_array,
    as_arrays,
    bare_trace,
    condition_of,
    decode_family,
    levels,
    masks,
    noise_of,
    prompts_of,
    sampling_of,
    stored_trace,
    tensor,
    velocity_of,
)
from branchgrpo.conformance.vectors.model import WEIGHTS, LinearVelocity
from branchgrpo.reference.implementation import Implementation, Trace
from branchgrpo.reference.options import Fusion, Normalization, Objective
from branchgrpo.reference.types import Reduction


def transition(implementation: Implementation, case: Case) -> dict[str, Any]:
    """Mean and std, and the mean's derivatives by velocity and state, element by element."""
    dtype = DTYPES[case.arguments["dtype"]]
    x, velocity = (tensor(case, name, dtype).requires_grad_() for name in ("x", "velocity"))
    mean, std = implementation.transition(decode_plan(case.arguments["plan"]), case.arguments["step"], x, velocity)
    slopes = torch.autograd.grad(mean.double().sum(), (x, velocity))
    same = {"dtype": str(mean.dtype).removeprefix("torch.")}
    return {
        **same,
        "mean": as_array(mean),
        "std": float(std),
        "x_slope": as_array(slopes[0]),
        "velocity_slope": as_array(slopes[1]),
    }


def branch_noise(implementation: Implementation, case: Case) -> dict[str, Any]:
    """ξ of every child."""
    dtype = DTYPES[case.arguments["dtype"]]
    spread = real(case.arguments["spread"], "spread")
    found = implementation.branch_noise(tensor(case, "shared", dtype), tensor(case, "private", dtype), spread)
    return {"noise": as_array(found)}


def log_probability(implementation: Implementation, case: Case) -> dict[str, Any]:
    """Log-probability of every item."""
    a = case.arguments
    child, mean = tensor(case, "child", DTYPES[a["storage"]]), tensor(case, "mean", DTYPES[a["dtype"]])
    return {"log_prob": as_array(implementation.log_probability(child, mean, a["std"], Reduction(a["reduction"])))}


def trace_answer(trace: Trace, prefix: str = "") -> dict[str, Any]:
    """States, means, stds and log-probabilities of a trace."""
    parts: dict[str, dict[int, Tensor | None]] = {
        "states": dict(enumerate(trace.states)),
        "means": {d + 1: level for d, level in enumerate(trace.means)},
        "log_probs": {d + 1: level for d, level in enumerate(trace.log_probs)},
    }
    found = {k: v for name, part in parts.items() for k, v in as_arrays(f"{prefix}{name}", part).items()}
    return {f"{prefix}stds": as_array(trace.stds), **found}


def rollout(implementation: Implementation, case: Case) -> dict[str, Any]:
    """The trees of every prompt, and the number of states that the model saw."""
    plan, sampling = decode_plan(case.arguments["plan"]), sampling_of(case)
    model = velocity_of(case, "model", sampling["dtype"])
    noise, condition = noise_of(case, plan.roots), condition_of(case)
    trace = implementation.rollout(plan, model, prompts_of(case), condition, noise, **sampling)
    return {**trace_answer(trace), "storage": dtype_name(trace.states), "calls": model.items}


def dtype_name(states: tuple[Tensor, ...]) -> str:
    """The dtype in which states were stored."""
    return ", ".join(sorted({str(level.dtype).removeprefix("torch.") for level in states}))


def singular_rollout(implementation: Implementation, case: Case) -> dict[str, Any]:
    """Every member of a family."""
    family, sampling = decode_family(case.arguments["family"]), sampling_of(case)
    model = velocity_of(case, "model", sampling["dtype"])
    noise, condition = noise_of(case, family.roots), condition_of(case)
    traces = implementation.singular_rollout(family, model, prompts_of(case), condition, noise, **sampling)
    found: dict[str, Any] = {"calls": model.items, "members": [list(member) for member in sorted(traces)]}
    for (k, granularity), trace in traces.items():
        found |= trace_answer(trace, f"{k}.{granularity}.")
    return found


def fuse(implementation: Implementation, case: Case) -> dict[str, Any]:
    """Values of every node."""
    trace = bare_trace(case, decode_plan(case.arguments["plan"]))
    options = decode_options(Fusion, case.arguments["fusion"], "fusion")
    return as_arrays("values", dict(enumerate(implementation.fuse(trace, tensor(case, "rewards"), options))))


def normalized_arguments(case: Case) -> tuple[Any, ...]:
    """Plan, values, weights and options."""
    plan = decode_plan(case.arguments["plan"])
    options = decode_options(Normalization, case.arguments["normalization"], "normalization")
    weights = reals(case.arguments["weights"], "weights")
    return plan, levels(case, "values", range(plan.steps + 1)), weights, options


def normalize(implementation: Implementation, case: Case) -> dict[str, Any]:
    """Advantages of every node."""
    return as_arrays("advantages", dict(enumerate(implementation.normalize(*normalized_arguments(case)))))


def leaf_keys(implementation: Implementation, case: Case) -> dict[str, Any]:
    """Keys of the leaves."""
    return {"keys": as_array(implementation.leaf_keys(*normalized_arguments(case)))}


def prune(implementation: Implementation, case: Case) -> dict[str, Any]:
    """Edges that stay."""
    a = case.arguments
    rules = tuple(decode_rule(rule, f"rules[{i}]") for i, rule in enumerate(a["rules"]))
    kept = implementation.prune(decode_plan(a["plan"]), tensor(case, "keys"), rules, a["iteration"])
    return as_arrays("kept", {d + 1: level for d, level in enumerate(kept)})


def trained_subsets(implementation: Implementation, case: Case) -> dict[str, Any]:
    """Edges of trainable steps that the chains' subsets let train."""
    a, plan = case.arguments, decode_plan(case.arguments["plan"])
    found = implementation.trained_subsets(plan, prompts_of(case), a["seed"], a["iteration"])
    return as_arrays("trained", {step + 1: found[step] for step in plan.trainable_steps})


def granular_advantages(implementation: Implementation, case: Case) -> dict[str, Any]:
    """Advantages of step k's children; each value below a child is the child's, each above the mean of the group."""
    a, values = case.arguments, {}
    family = decode_family(a["family"])
    options = decode_options(Normalization, a["normalization"], "normalization")
    for granularity in family.granularities:
        own = tensor(case, f"values.{granularity}")
        above = own.reshape(len(own), family.roots, family.group, -1).mean(dim=2)
        steps = family.member(a["k"], granularity).steps
        values[granularity] = tuple(above if depth <= a["k"] else own for depth in range(steps + 1))
    found = implementation.granular_advantages(family, a["k"], values, reals(a["weights"], "weights"), options)
    return {"advantages": as_array(found)}


def objective(implementation: Implementation, case: Case) -> dict[str, Any]:
    """J, its gradient by the model's weights, and that by the frozen policy's, which has to be 0."""
    a, dtype = case.arguments, DTYPES[case.arguments["dtype"]]
    plans = [decode_plan(plan, f"plans[{i}]") for i, plan in enumerate(a["plans"])]
    options = decode_options(Objective, a["objective"], "objective")
    model = velocity_of(case, "model", dtype)
    frozen = velocity_of(case, "frozen", dtype) if a["frozen"] else None
    value = implementation.objective(
        [stored_trace(case, plan, t) for t, plan in enumerate(plans)],
        model,
        condition_of(case),
        [levels(case, f"advantages.{t}", range(plan.steps + 1)) for t, plan in enumerate(plans)],
        [masks(case, f"kept.{t}", plan) for t, plan in enumerate(plans)],
        options,
        Reduction(a["reduction"]),
        frozen,
    )
    found: dict[str, Any] = {"value": float(value.detach())}
    for name, network in {"gradient": model, "frozen_gradient": frozen}.items():
        if network is not None:
            found |= {f"{name}.{part}": as_array(g) for part, g in gradients(value, network).items()}
    return found


def gradients(value: Tensor, model: LinearVelocity) -> dict[str, Tensor]:
    """Gradient by every weight; 0 where there is none."""
    parameters = [getattr(model, name) for name in WEIGHTS]
    raw = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for name, p, g in zip(WEIGHTS, parameters, raw, strict=True)}


DRIVERS: dict[str, Callable[[Implementation, Case], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        transition, branch_noise, log_probability, rollout, fuse, normalize, leaf_keys, prune, trained_subsets,
        objective, singular_rollout, granular_advantages,
    )
}  # fmt: skip
"""Operation → how a vector drives it."""
