"""Whether a checkpoint belongs to this configuration; if not, which options differ, by name."""

import tomllib
from collections.abc import Mapping
from typing import Any

from branchgrpo.training.checkpoint.errors import CheckpointError
from branchgrpo.training.checkpoint.state import TrainState
from branchgrpo.training.config.effects import EFFECTS

ABSENT = "absent"
SHOWN = 8


def options(content: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as ``table.option`` → value; tables in a list are numbered."""
    if isinstance(content, Mapping):
        pairs = [(f"{prefix}.{key}" if prefix else str(key), value) for key, value in content.items()]
    elif isinstance(content, list) and content and all(isinstance(item, Mapping) for item in content):
        pairs = [(f"{prefix}.{index}", value) for index, value in enumerate(content)]
    else:
        return {prefix: content}
    return {name: value for key, inner in pairs for name, value in options(inner, key).items()}


def differing(saved: str, present: str) -> dict[str, tuple[Any, Any]]:
    """Options whose values differ between two resolved configurations.

    Args:
        saved, present: texts of TOML files.

    Returns:
        ``table.option`` → value in the first, value in the second.

    Raises:
        CheckpointError: no TOML.
    """
    try:
        old, new = options(tomllib.loads(saved)), options(tomllib.loads(present))
    except tomllib.TOMLDecodeError as error:
        raise CheckpointError("checkpoint: config.toml", str(error), "the TOML that was written") from error
    pairs = {name: (old.get(name, ABSENT), new.get(name, ABSENT)) for name in [*old, *new]}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def changes(option: str) -> frozenset[str]:
    """What an option of a TOML file changes, such as ``numbers``; an unknown one may change everything."""
    parts = [part for part in option.split(".") if not part.isdecimal()]
    for length in range(len(parts), 0, -1):
        effect = EFFECTS.get(".".join(parts[:length]))
        if effect is not None:
            return frozenset(effect.changes)
    inner = [effect.changes for name, effect in EFFECTS.items() if name.startswith(".".join(parts) + ".")]
    return frozenset().union(*inner) if inner else frozenset({"numbers"})


def check_config(state: TrainState, config: str, config_hash: str) -> list[str]:
    """See that a checkpoint was made under the same options, apart from those that change no number.

    Args:
        state: of the checkpoint.
        config: text of this run's resolved configuration.
        config_hash: of this run.

    Returns:
        What differs and changes the rounding of numbers, a line each: the resumed run is not bit-identical then.

    Raises:
        CheckpointError: names the options that differ, with both values.
    """
    found = differing(state.config, config)
    lines = {name: f"{name} = {old!r}, now {new!r}" for name, (old, new) in sorted(found.items())}
    if state.config_hash == config_hash:
        return [line for name, line in lines.items() if "rounding" in changes(name)]
    deciding = [line for name, line in lines.items() if "numbers" in changes(name)]
    stretched = [line for name, line in lines.items() if name == "run.iterations"]  # the schedule's length
    named = deciding or stretched or list(lines.values())
    more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
    shown = "; ".join(named[:SHOWN]) + more if named else f"hash {state.config_hash[:12]}"
    raise CheckpointError("checkpoint: config", shown, f"that of this run ({config_hash[:12]})")
