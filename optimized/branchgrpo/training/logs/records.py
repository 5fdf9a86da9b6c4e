"""The lines of ``metrics.jsonl``, by kind: start, iteration, evaluation, end."""

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from branchgrpo.training.evaluation.evaluate import Evaluation
from branchgrpo.training.monitors.limits import Finding

PACKAGES = ("branchgrpo", "torch", "numpy", "diffusers", "transformers", "accelerate", "peft", "safetensors")
"""Packages whose versions a run notes down, where they are installed."""

Record = dict[str, Any]


def versions() -> dict[str, str]:
    """Version of Python and of every package of ``PACKAGES`` that is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def start_record(iteration: int, time: float, *, processes: int, device: str, facts: Mapping[str, Any]) -> Record:
    """A process begins, or goes on from a checkpoint.

    Args:
        iteration: the first one to run.
        time: seconds since the epoch.
        processes: that train together.
        device: of the first one.
        facts: whatever else the run wants to have noted, such as the configuration's hash.
    """
    machine = {"system": platform.platform(), "cores": os.cpu_count(), "device": device, "processes": processes}
    return {
        "kind": "start",
        "iteration": iteration,
        "time": time,
        "machine": machine,
        "versions": versions(),
        **facts,
    }


def iteration_record(
    iteration: int,
    time: float,
    metrics: Mapping[str, float],
    seconds: Mapping[str, float],
    findings: Sequence[Finding] = (),
) -> Record:
    """One iteration: its numbers, its seconds by phase, and what the monitors found."""
    return {
        "kind": "iteration",
        "iteration": iteration,
        "time": time,
        "metrics": dict(metrics),
        "seconds": dict(seconds),
        "findings": [finding.as_dict() for finding in findings],
    }


def evaluation_record(
    iteration: int,
    time: float,
    evaluation: Evaluation,
    metrics: Mapping[str, float],
    *,
    seconds: float,
    averaged: bool,
    grid: str | None = None,
    findings: Sequence[Finding] = (),
) -> Record:
    """One evaluation.

    Args:
        iteration: iterations done when it was made; 0 is the model before training.
        time: seconds since the epoch.
        evaluation: what it found, and ``metrics`` made of it.
        metrics: see ``Evaluation.metrics``.
        seconds: it took.
        averaged: whether the EMA weights were evaluated.
        grid: its sample grid, relative to the run's folder.
        findings: of the monitors.
    """
    held = [s.name for s in evaluation.scored if s.held_out or s.weight == 0.0]
    return {
        "kind": "evaluation",
        "iteration": iteration,
        "time": time,
        "metrics": dict(metrics),
        "held_out": held,
        "trained": {s.name: s.weight for s in evaluation.scored if s.name not in held},
        "prompts": evaluation.by_prompt(),
        "weights": "ema" if averaged else "trained",
        "grid": grid,
        "seconds": seconds,
        "findings": [finding.as_dict() for finding in findings],
    }


def end_record(iteration: int, time: float, reason: str, text: str = "") -> Record:
    """A process ends: ``finished``, ``interrupted``, ``stopped`` by a monitor, or ``failed``; with what was said."""
    return {"kind": "end", "iteration": iteration, "time": time, "reason": reason, "text": text}
