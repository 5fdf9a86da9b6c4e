"""A record's levels as the rows of a trace file, and back (TRACE-7)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from branchgrpo.conformance.record import FIELDS, Level, Record, check_array
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import KernelKind

KERNEL_CODES = {KernelKind.ODE: 0, KernelKind.SDE: 1, KernelKind.FLOW_SDE: 2, KernelKind.CPS: 3}
STRUCTURE = ("node.depth", "node.root", "node.index", "node.parent")
STEPS = ("edge.kernel", "edge.is_sde", "edge.sigma", "edge.sigma_next")


def structure_rows(plan: Plan) -> dict[str, Tensor]:
    """``node.*`` indices of every row, as the plan implies them (TRACE-2)."""
    depths, roots, indices, parents, before = [], [], [], [], 0
    for depth, size in enumerate(plan.level_sizes):
        rows = torch.arange(plan.roots * size)
        depths.append(torch.full_like(rows, depth))
        roots.append(rows // size)
        indices.append(rows % size)
        parents.append(before + rows // plan.branching[depth - 1] if depth else torch.full_like(rows, -1))
        before += 0 if depth == 0 else plan.roots * plan.level_sizes[depth - 1]
    return dict(zip(STRUCTURE, (torch.cat(part) for part in (depths, roots, indices, parents)), strict=True))


def step_rows(plan: Plan) -> dict[str, Tensor]:
    """``edge.*`` constants of every row, as the plan implies them."""
    depth = structure_rows(plan)["node.depth"]
    kernels, stochastic = plan.effective_kernels, plan.stochastic_steps
    columns = {
        "edge.kernel": torch.tensor([0, *(KERNEL_CODES[kernel.kind] for kernel in kernels)]),
        "edge.is_sde": torch.tensor([False, *(i in stochastic for i in range(plan.steps))]),
        "edge.sigma": torch.tensor([0.0, *plan.sigmas[:-1]], dtype=torch.float64),
        "edge.sigma_next": torch.tensor([0.0, *plan.sigmas[1:]], dtype=torch.float64),
    }
    return {name: column[depth] for name, column in columns.items()}


def to_rows(record: Record) -> dict[str, Tensor]:
    """All arrays of a record by their names in the file."""
    plan = record.plan
    depth = structure_rows(plan)["node.depth"]
    stds = torch.cat([torch.zeros(1, dtype=torch.float64), record.stds.cpu()])
    arrays = structure_rows(plan) | step_rows(plan) | {"edge.std": stds[depth]}
    for name, level in record.levels.items():
        arrays[FIELDS[name].array] = join_levels(record, name, level)
    if record.rewards is not None:
        arrays["leaf.reward"] = record.rewards.clone()
    return arrays


def join_levels(record: Record, name: str, level: Level) -> Tensor:
    """``[prompts, rows, *rest]`` from an array a depth; the other depths hold the default."""
    some = next(iter(level.values())) if level else torch.zeros(0, dtype=FIELDS[name].dtype)
    parts = []
    for depth in record.depths("all"):
        shape = (len(record.prompts), record.nodes(depth), *record.trailing_shape(name))
        parts.append(level.get(depth, torch.full(shape, FIELDS[name].default, dtype=some.dtype)).cpu())
    return torch.cat(parts, dim=1)


def split_rows(plan: Plan, name: str, rows: Tensor, where: str) -> Level:
    """An array a depth from ``[prompts, rows, *rest]``; depths that the field does not have must hold the default."""
    field, sizes = FIELDS[name], [plan.roots * size for size in plan.level_sizes]
    if rows.ndim < 2 or rows.shape[1] != sum(sizes):
        raise InputError(f"{where}/{field.array}: shape", tuple(rows.shape), f"(prompts, {sum(sizes)} rows, …)")
    parts = dict(enumerate(torch.split(rows, sizes, dim=1)))
    stochastic = [step + 1 for step in plan.stochastic_steps]
    wanted = {"all": list(parts), "edges": list(parts)[1:], "stochastic": stochastic}[field.depths]
    for depth, part in parts.items():
        if depth not in wanted and not bool((part == field.default).all()):
            raise InputError(f"{where}/{field.array} at depth {depth}", "other values", f"{field.default} throughout")
    return {depth: parts[depth] for depth in wanted}


def check_structure(plan: Plan, arrays: Mapping[str, Tensor], where: str) -> None:
    """Refuse rows that contradict the plan: another tree, another kernel, other noise levels.

    Their number is compared first, so that a plan of absurd size allocates nothing (TRACE-5).
    """
    rows, first = plan.roots * sum(plan.level_sizes), arrays["node.depth"]
    if tuple(first.shape) != (rows,):
        raise InputError(f"{where}/node.depth: shape", tuple(first.shape), f"({rows},), as the plan implies")
    for name, wanted in (structure_rows(plan) | step_rows(plan)).items():
        found = arrays[name]
        check_array(found, tuple(wanted.shape), wanted.dtype, f"{where}/{name}")
        if not torch.equal(found, wanted):
            row = int((found != wanted).nonzero()[0])
            raise InputError(f"{where}/{name}[{row}]", found[row].item(), f"{wanted[row].item()}, as the plan implies")


def step_stds(plan: Plan, rows: Tensor, where: str) -> Tensor:
    """The std of every step, which all its edges share."""
    depth = structure_rows(plan)["node.depth"]
    check_array(rows, tuple(depth.shape), torch.float64, f"{where}/edge.std")
    stds = torch.stack([rows[depth == d][0] for d in range(plan.steps + 1)])
    if not torch.equal(stds[depth], rows):
        raise InputError(f"{where}/edge.std", "different within a step", "one std a step")
    return stds[1:]
