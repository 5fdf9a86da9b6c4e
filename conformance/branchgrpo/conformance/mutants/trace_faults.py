"""Mutants of traces: faults that show in what a run dumps, not in any single operation."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from branchgrpo.conformance.mutants.base import file_mutant, record_mutant
from branchgrpo.conformance.record import Record
from branchgrpo.conformance.record_io import json_path


@record_mutant("SING-6", published="G5")
def one_optimiser_step_for_every_k(record: Record) -> Record:
    """The ratios of member k are computed after k optimiser steps."""
    if record.member is None or not record.has("weight_versions"):
        return record
    levels = {depth: level + record.member[0] for depth, level in record.levels["weight_versions"].items()}
    return record.with_levels(weight_versions=levels)


@record_mutant("OBJ-3")
def dropped_edges_declared_trained(record: Record) -> Record:
    """The dumped E is that of the unpruned tree."""
    if not record.has("kept", "trainable"):
        return record
    levels = {
        depth: torch.full_like(mask, depth - 1 in record.plan.trainable_steps)
        for depth, mask in record.levels["trainable"].items()
    }
    return record.with_levels(trainable=levels)


@record_mutant("WIN-5")
def decay_forgotten(record: Record) -> Record:
    """The window schedule has another decay than the one that gave the plan."""
    if record.window is None or record.window.decay == "constant":
        return record
    return replace(record, window=replace(record.window, period=3 * record.window.period))


@record_mutant("WIN-6")
def random_windows_from_another_seed(record: Record) -> Record:
    """Each rank draws its own window."""
    if record.window is None or record.window.order != "random" or record.seed is None:
        return record
    return replace(record, seed=record.seed + 1)


@record_mutant("TRACE-7")
def a_level_is_missing(record: Record) -> Record:
    """The leaves' states were not dumped."""
    states = dict(record.levels["states"])
    del states[record.plan.steps]
    return record.with_levels(states=states)


def edit(path: Path, change: Any) -> None:
    """Change the JSON of a trace."""
    document = json.loads(json_path(path).read_text(encoding="utf-8"))
    change(document)
    json_path(path).write_text(json.dumps(document), encoding="utf-8")


@file_mutant("SCHED-1", published="G1")
def granular_schedule_stops_above_zero(path: Path) -> None:
    """The last level of a member is above 0."""

    def stop_early(document: Any) -> None:
        for record in document["records"]:
            if record["member"] is not None:
                record["plan"]["sigmas"][-1] = 0.1667 * record["plan"]["sigmas"][-2]
                break

    edit(path, stop_early)


@file_mutant("PLAN-3", published="B13")
def split_steps_clamped_into_the_range(path: Path) -> None:
    """A split falls onto the last step, which is deterministic under ``denoised``."""

    def clamp(document: Any) -> None:
        plan = document["records"][0]["plan"]
        plan["branching"][-1] = 2

    edit(path, clamp)


@file_mutant("TRACE-6")
def another_schema_version(path: Path) -> None:
    """A version that nobody has written down."""
    edit(path, lambda document: document.update(version=99))


@file_mutant("TRACE-2")
def parents_in_another_order(path: Path) -> None:
    """Rows whose parents are not those of level order."""
    arrays = load_file(path)
    arrays["0/node.parent"] = arrays["0/node.parent"].flip(0)
    save_file(arrays, path)
