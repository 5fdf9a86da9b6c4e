"""Whether a checkpoint belongs to this configuration; if not, which options differ, by name."""

import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from branchgrpo.training.checkpoint.errors import CheckpointError
from branchgrpo.training.checkpoint.state import TrainState

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


def every(option: str) -> bool:
    """Take every option to decide the numbers."""
    return True


def check_config(state: TrainState, config: str, config_hash: str, decides: Callable[[str], bool] = every) -> None:
    """See that a checkpoint was made under the same options, apart from those that change no number.

    Args:
        state: of the checkpoint.
        config: text of this run's resolved configuration.
        config_hash: of this run.
        decides: whether an option, ``table.option``, can change the numbers.

    Raises:
        CheckpointError: names the options that differ, with both values.
    """
    if state.config_hash == config_hash:
        return
    found = {name: pair for name, pair in differing(state.config, config).items() if decides(name)}
    listed = [f"{name} = {old!r}, now {new!r}" for name, (old, new) in sorted(found.items())]
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    shown = "; ".join(listed[:SHOWN]) + more if listed else f"hash {state.config_hash[:12]}"
    raise CheckpointError("checkpoint: config", shown, f"that of this run ({config_hash[:12]})")
