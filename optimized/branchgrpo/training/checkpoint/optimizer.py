"""The optimiser's state, keyed by the names of the parameters instead of their positions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from branchgrpo.reference.errors import InputError
from branchgrpo.training.checkpoint.errors import CheckpointError
from branchgrpo.training.checkpoint.tensors import like, whole

Scalar = int | float | bool | str | None
SEPARATOR = "/"
"""Between an entry and the parameter's name, and between the levels of a nested entry; names hold dots only."""
STEP = "step"
"""A counter, whatever the parameter's shape; the optimiser itself decides where it lives."""


@dataclass(frozen=True)
class OptimizerState:
    """What an optimiser remembers.

    Attributes:
        tensors: ``entry/parameter`` → whole tensor in its own dtype (8-bit states stay as they are).
        scalars: ``entry/parameter`` → number; step counters that are no tensors.
        groups: one a parameter group: its options, and under ``params`` the names of its parameters.
    """

    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, Scalar]
    groups: tuple[Mapping[str, Any], ...]


def names_of(optimizer: Optimizer, network: nn.Module) -> list[list[str]]:
    """Names of the parameters of every group.

    Raises:
        InputError: a parameter that the network does not have.
    """
    known = {id(parameter): name for name, parameter in network.named_parameters()}
    try:
        return [[known[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    except KeyError:
        raise InputError("optimizer", "a parameter of another network", "over parameters of this network") from None


def flat(entries: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested entries (8-bit optimisers have them) as one level of ``outer/inner``."""
    result: dict[str, Any] = {}
    for key, value in entries.items():
        path = f"{prefix}{key}"
        result |= flat(value, path + SEPARATOR) if isinstance(value, Mapping) else {path: value}
    return result


def nested(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``flat``."""
    result: dict[str, Any] = {}
    for path, value in entries.items():
        *outer, last = path.split(SEPARATOR)
        level = result
        for key in outer:
            level = level.setdefault(key, {})
        level[last] = value
    return result


def optimizer_state(optimizer: Optimizer, network: nn.Module, keep: bool = True) -> OptimizerState:
    """Copy an optimiser's state; with FSDP2 a collective that every rank calls.

    Args:
        optimizer: over parameters of ``network``.
        network: gives the names; not a wrapper of it.
        keep: whether this rank wants the copy; the others only take part in gathering.

    Raises:
        InputError: a parameter that the network does not have, or an entry that is neither tensor nor number.
    """
    packed, names = optimizer.state_dict(), names_of(optimizer, network)
    order = [name for group in names for name in group]
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Scalar] = {}
    for index, name in enumerate(order):
        for entry, value in flat(packed["state"].get(index, {})).items():
            key = entry + SEPARATOR + name
            if isinstance(value, Tensor):
                copy = whole(value, keep)
                tensors |= {} if copy is None else {key: copy}
            elif value is None or isinstance(value, int | float | str):
                scalars[key] = value
            else:
                raise InputError(f"optimizer state {key}", type(value).__name__, "a tensor or a number")
    groups = [{**group, "params": tuple(own)} for group, own in zip(packed["param_groups"], names, strict=True)]
    for option, value in (item for group in groups for item in group.items()):
        if not all(part is None or isinstance(part, int | float | str) for part in as_tuple(value)):
            raise InputError(f"optimizer option {option}", type(value).__name__, "a number, a word, or several")
    return OptimizerState(tensors, scalars, tuple(groups))


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Several values as they are, a single one alone."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def restore_optimizer(state: OptimizerState, optimizer: Optimizer, network: nn.Module) -> None:
    """Give an optimiser over the same parameters a saved state: tensors as they were, options of the groups too.

    Raises:
        CheckpointError: other groups of parameters, or a tensor for a parameter that there is not.
    """
    names = names_of(optimizer, network)
    saved = [list(group["params"]) for group in state.groups]
    if sorted(map(sorted, saved)) != sorted(map(sorted, names)):
        found, here = [len(group) for group in saved], [len(group) for group in names]
        legal = f"those of this run, {here} parameters a group"
        raise CheckpointError("checkpoint: parameter groups of the optimizer", found, legal)
    parameters = dict(network.named_parameters())
    entries: dict[str, dict[str, Any]] = {}
    for key, value in [*state.tensors.items(), *state.scalars.items()]:
        entry, _, name = key.rpartition(SEPARATOR)
        if not entry or name not in parameters:
            raise CheckpointError("checkpoint: optimizer state", key, "of a parameter of this model")
        if isinstance(value, Tensor):
            sharded_alike = value.shape == parameters[name].shape and entry != STEP
            value = like(value, parameters[name]) if sharded_alike else value.clone()
        entries.setdefault(name, {})[entry] = value
    by_content = {frozenset(group["params"]): group for group in state.groups}
    packed: dict[int, Any] = {}
    index, groups = 0, []
    for own in names:
        options = {key: value for key, value in by_content[frozenset(own)].items() if key != "params"}
        groups.append({**options, "params": list(range(index, index + len(own)))})
        packed |= {index + i: nested(entries[name]) for i, name in enumerate(own) if name in entries}
        index += len(own)
    optimizer.load_state_dict({"state": packed, "param_groups": groups})
