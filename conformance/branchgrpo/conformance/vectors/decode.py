"""From a vector's plain data and arrays to what operations take."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from branchgrpo.conformance.codec import check_keys, decode_kernel, decode_output, items, reals
from branchgrpo.conformance.vectors.cases import Array, Case
from branchgrpo.conformance.vectors.model import WEIGHTS, LinearVelocity, TableNoise
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.implementation import Levels, Masks, Trace
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Guidance, Prompt, TensorCondition
from branchgrpo.reference.types import Reduction

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def decode_family(data: Any) -> PlanFamily:
    """A plan family, checked as on construction."""
    d = check_keys(data, {field.name for field in fields(PlanFamily)}, "family")
    return PlanFamily(
        sigmas=reals(d["sigmas"], "family.sigmas"),
        kernel=decode_kernel(check_keys(d["kernel"], {"kind", "eta"}, "family.kernel"), "family.kernel"),
        ks=tuple(items(d["ks"], "family.ks")),
        group=d["group"],
        granularities=tuple(items(d["granularities"], "family.granularities")),
        stride_anchor=d["stride_anchor"],
        roots=d["roots"],
        output=decode_output(d["output"], "family.output"),
    )


def prompts_of(case: Case) -> tuple[Prompt, ...]:
    """The prompts of a case."""
    return tuple(Prompt(i, f"prompt {i}") for i in case.arguments["prompts"])


def tensor(case: Case, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """An input array on the case's device, its floats in a dtype."""
    if name not in case.inputs:
        raise InputError(f"{case.id}/in.{name}", "missing", "an array of the vector")
    found = torch.from_numpy(case.inputs[name].copy()).to(case.device)
    return found.to(dtype) if found.dtype.is_floating_point else found


def levels(case: Case, name: str, depths: range, dtype: torch.dtype = torch.float64) -> Levels:
    """Input arrays ``NAME.d`` of some depths."""
    return tuple(tensor(case, f"{name}.{depth}", dtype) for depth in depths)


def condition_of(case: Case) -> TensorCondition:
    """The labels as a condition, one item a prompt."""
    return TensorCondition({"label": tensor(case, "labels")})


def velocity_of(case: Case, name: str, dtype: torch.dtype) -> LinearVelocity:
    """A linear model by the prefix of its arrays."""
    weights = {part: tensor(case, f"{name}.{part}") for part in WEIGHTS}
    return LinearVelocity(weights, dtype, Guidance(**case.arguments["guidance"]))


def noise_of(case: Case, roots: int) -> TableNoise:
    """The draws of a rollout."""
    tables = {}
    for name in case.inputs:
        if name.startswith("noise."):
            _, role, depth = name.split(".")
            tables[role, int(depth)] = tensor(case, name)
    return TableNoise(case.arguments["iteration"], prompts_of(case), roots, tables)


def sampling_of(case: Case) -> dict[str, Any]:
    """Keyword arguments of a rollout."""
    a = case.arguments
    return {
        "latent_shape": tuple(a["latent"]),
        "dtype": DTYPES[a["dtype"]],
        "storage_dtype": DTYPES[a["storage"]],
        "reduction": Reduction(a["reduction"]),
        "iteration": a["iteration"],
    }


def bare_trace(case: Case, plan: Plan) -> Trace:
    """A trace for fusion: its log-probabilities are the case's, its states are zeros."""
    prompts = prompts_of(case)
    shapes = [(len(prompts), plan.roots * size, 1) for size in plan.level_sizes]
    zeros = [torch.zeros(shape, dtype=torch.float64, device=case.device) for shape in shapes]
    noisy = plan.stochastic_steps
    stds = torch.tensor([1.0 if step in noisy else 0.0 for step in range(plan.steps)], dtype=torch.float64)
    log_probs = tuple(tensor(case, f"log_probs.{step + 1}") if step in noisy else None for step in range(plan.steps))
    return Trace(plan, prompts, tuple(zeros), tuple(zeros[1:]), stds, log_probs)


def stored_trace(case: Case, plan: Plan, index: int) -> Trace:
    """A whole trace, number ``index`` of an update."""
    depths, noisy = range(1, plan.steps + 1), plan.stochastic_steps
    log_probs = tuple(tensor(case, f"log_probs.{index}.{d}") if d - 1 in noisy else None for d in depths)
    dtype, storage = DTYPES[case.arguments["dtype"]], DTYPES[case.arguments["storage"]]
    return Trace(
        plan,
        prompts_of(case),
        levels(case, f"states.{index}", range(plan.steps + 1), storage),
        levels(case, f"means.{index}", depths, dtype),
        tensor(case, f"stds.{index}"),
        log_probs,
    )


def masks(case: Case, name: str, plan: Plan) -> Masks:
    """Masks of the edges, by child depth."""
    return tuple(tensor(case, f"{name}.{depth}") for depth in range(1, plan.steps + 1))


def as_array(found: Tensor) -> Array:
    """A tensor as a vector holds it: floats as float64, exactly."""
    plain = found.detach().cpu()
    return np.ascontiguousarray((plain.double() if plain.dtype.is_floating_point else plain).numpy())


def as_arrays(name: str, found: Mapping[int, Tensor | None]) -> dict[str, Array]:
    """Levels as arrays ``NAME.d``; absent levels are left out."""
    return {f"{name}.{depth}": as_array(level) for depth, level in found.items() if level is not None}
