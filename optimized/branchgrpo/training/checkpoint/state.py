"""Everything a run needs to go on: tensors, and a page of JSON; nothing pickled."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from branchgrpo.reference.errors import InputError, is_integer
from branchgrpo.training.checkpoint.errors import CheckpointError
from branchgrpo.training.checkpoint.optimizer import OptimizerState, optimizer_state, restore_optimizer
from branchgrpo.training.checkpoint.tensors import check_fit, collect, put, trained_state

FORMAT = 1
COUNTS = ("iteration", "seed", "optimizer_steps", "world_size")
TENSORS = ("weights", "optimizer", "ema")


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    packages = {name: version(name) for name in ("branchgrpo", "numpy")}
    return {**packages, "torch": torch.__version__, "python": platform.python_version()}


@dataclass(frozen=True)
class TrainState:
    """A run between two iterations.

    Noise, windows, subsets and the sampler's batches are functions of the seed and the iteration, so there is no state
    of random numbers; ``derived`` holds some of their values for a resume to compare.

    Attributes:
        iteration: next to run, ≥ 0: the number of iterations that are done.
        seed: the run's.
        optimizer_steps: done so far; the learning rate is a function of it.
        world_size: number of ranks that saved; another one may resume, tensors are whole.
        config: resolved configuration, the text of its TOML file.
        config_hash: of what decides the numbers.
        weights: see ``tensors.trained_state``.
        optimizer: by parameter names.
        ema: averaged weights, or None where none are kept.
        sampler: position of the sampler and a description of its prompts, plain JSON.
        derived: values that follow from seed and iteration, plain JSON.
        log_bytes: file name → length of each log of the run's folder when the checkpoint was taken.
        baselines: of the monitors: the first evaluation, the first diversity; plain JSON.
        versions: see ``versions``.
    """

    iteration: int
    seed: int
    optimizer_steps: int
    world_size: int
    config: str
    config_hash: str
    weights: Mapping[str, Tensor]
    optimizer: OptimizerState
    ema: Mapping[str, Tensor] | None = None
    sampler: Mapping[str, Any] = field(default_factory=dict)
    derived: Mapping[str, Any] = field(default_factory=dict)
    log_bytes: Mapping[str, int] = field(default_factory=dict)
    baselines: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if not is_integer(value) or value < (name == "world_size"):
                raise InputError(f"state.{name}", value, "an integer ≥ 0 (world_size: ≥ 1)")


@dataclass(frozen=True)
class Captured:
    """The tensors of a run, copied to the CPU's memory; empty on ranks that do not keep them."""

    weights: Mapping[str, Tensor]
    optimizer: OptimizerState
    ema: Mapping[str, Tensor] | None


def capture(
    network: nn.Module, optimizer: Optimizer, ema: Mapping[str, Tensor] | None = None, keep: bool = True
) -> Captured:
    """Copy what training changes; with FSDP2 a collective that every rank calls.

    Args:
        network: the policy itself, no wrapper of it (FSDP2 shards in place and is none).
        optimizer: over its parameters.
        ema: averaged weights by name, or None.
        keep: whether this rank wants the copies (rank 0).

    Raises:
        InputError: an optimiser over another network, or one with state that is neither tensor nor number.
    """
    weights = collect(trained_state(network).items(), keep)
    moments = optimizer_state(optimizer, network, keep)
    return Captured(weights, moments, None if ema is None else collect(ema.items(), keep))


def restore(
    state: TrainState, network: nn.Module, optimizer: Optimizer, ema: Mapping[str, Tensor] | None = None
) -> None:
    """Put a state into a freshly built run; everything is checked before the first tensor changes.

    Args:
        state: from ``read.load``.
        network, optimizer: as in ``capture``, of the same configuration, on any number of ranks.
        ema: the tensors that hold the averages; None if and only if the state has none.

    Raises:
        CheckpointError: another model or optimiser, or an average on one side only.
    """
    if (ema is None) != (state.ema is None):
        found = "none" if state.ema is None else f"of {len(state.ema)} tensors"
        raise CheckpointError("checkpoint: ema", found, "kept if and only if this run keeps one")
    present = trained_state(network)
    check_fit("weights", state.weights, present)
    if ema is not None and state.ema is not None:
        check_fit("ema", state.ema, ema)
    restore_optimizer(state.optimizer, optimizer, network)
    put("weights", state.weights, present)
    if ema is not None and state.ema is not None:
        put("ema", state.ema, ema)


def notes(state: TrainState, world_size: int) -> list[str]:
    """What differs from the run that saved without forbidding a resume; the numbers may then differ by rounding."""
    here = versions()
    found = [f"{name} {old} saved, {here.get(name)} resumes" for name, old in state.versions.items()]
    found = [note for note, (name, old) in zip(found, state.versions.items(), strict=True) if here.get(name) != old]
    if state.world_size != world_size:
        found.append(f"{state.world_size} ranks saved, {world_size} resume")
    return found


def check_derived(state: TrainState, seed: int, derived: Mapping[str, Any], sampler: Mapping[str, Any]) -> None:
    """Compare what follows from seed and iteration with what followed when the checkpoint was saved.

    Raises:
        CheckpointError: the first value that differs: the run would not go on where it stopped.
    """
    pairs: list[tuple[str, Any, Any]] = [("seed", state.seed, seed)]
    for group, old, new in (("derived", state.derived, derived), ("sampler", state.sampler, sampler)):
        pairs += [(f"{group}.{key}", old.get(key), new.get(key)) for key in sorted({*old, *new})]
    for name, old, new in pairs:
        if old != new:
            raise CheckpointError(f"checkpoint: {name}", old, f"{new!r}, as in this run")


def to_json(state: TrainState) -> dict[str, Any]:
    """All that is no tensor."""
    plain = {item.name: getattr(state, item.name) for item in fields(state) if item.name not in (*TENSORS, "config")}
    moments = {"scalars": state.optimizer.scalars, "groups": state.optimizer.groups}
    return {"format": FORMAT, **plain, "has_ema": state.ema is not None, "optimizer": moments}


def from_json(content: Any, config: str, tensors: Mapping[str, Mapping[str, Tensor]]) -> TrainState:
    """The inverse of ``to_json``.

    Args:
        content: parsed JSON.
        config: text of the configuration's file.
        tensors: ``weights``, ``optimizer`` and, where there is an average, ``ema``.

    Raises:
        CheckpointError: another format, or a value that is missing or out of range.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError("checkpoint: format", found, f"{FORMAT}, that of this version")
    if content.get("has_ema") != ("ema" in tensors):
        raise CheckpointError("checkpoint: has_ema", content.get("has_ema"), "what the files say")
    try:
        moments = content["optimizer"]
        groups = tuple({key: restored(value) for key, value in group.items()} for group in moments["groups"])
        optimizer = OptimizerState(tensors["optimizer"], moments["scalars"], groups)
        names = [item.name for item in fields(TrainState) if item.name not in (*TENSORS, "config")]
        plain = {name: content[name] for name in names}
        return TrainState(
            **plain, config=config, weights=tensors["weights"], optimizer=optimizer, ema=tensors.get("ema")
        )
    except (KeyError, TypeError, AttributeError, InputError) as error:
        raise CheckpointError("checkpoint: state.json", str(error), "what this version writes") from error


def restored(value: Any) -> Any:
    """JSON has lists only; options of an optimiser are tuples."""
    return tuple(value) if isinstance(value, list) else value
