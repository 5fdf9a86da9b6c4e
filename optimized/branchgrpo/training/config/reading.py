"""A run's configuration from a preset, a TOML file and overrides; written again as it was resolved."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_origin

from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.training.config.documents import laid_over, parse_value, put, read_document, split_override
from branchgrpo.training.config.effects import EFFECTS
from branchgrpo.training.config.leaves import leaves, members, nearest, optional, row_kind
from branchgrpo.training.config.names import on_its_base, preset_document
from branchgrpo.training.config.schema import TrainConfig
from branchgrpo.training.config.typed import short, typed

UNREAD = ("audit",)
"""Tables of a run's file that others read."""
HEADER = '# Every option of the run, defaults included. "" stands for an option that is not given.\n\n'


def read_config(path: Path | str | None = None, overrides: Sequence[str] = (), preset: str = "") -> TrainConfig:
    """The configuration of a run: defaults, under a preset, under a TOML file, under overrides.

    A file may stand on another one, or on a preset: ``base = "other.toml"``, ``base = "branchgrpo@digits"``. Tables
    are joined key by key; lists, and the tables ``[[rewards]]``, are replaced as a whole. The empty text ``""`` takes
    back an option that may be left out, such as ``model.lora``. A table ``[audit]`` is left to ``branchgrpo audit``.

    Args:
        path: the file; None for none.
        overrides: ``option.name=value``, the value as in TOML, quotes around text optional.
        preset: a name of ``names.preset_names``; "" for none.

    Raises:
        InputError: a file that cannot be read, or is no TOML.
        OptionError: an unknown option, with the nearest one; a value that is not legal; a contradiction.
    """
    tree = defaults()
    if preset:
        tree = laid_over(tree, preset_document(preset))
    if path is not None:
        document = read_document(Path(path))
        if preset and "base" in document:
            raise OptionError("base", document["base"], f"left out beside the preset {preset}")
        document = on_its_base(document, Path(path).parent, 0)
        tree = laid_over(tree, {key: value for key, value in document.items() if key not in UNREAD})
    for word in overrides:
        key, text = split_override(word)
        tree = put(tree, key, parse_value(text, textual=is_textual(key)))
    return config_from(tree)


@cache
def defaults() -> dict[str, Any]:
    """Every option's default as nested tables; what is laid over them makes new ones."""
    return asdict(TrainConfig())


def load_preset(name: str) -> TrainConfig:
    """The configuration of a preset, such as ``branchgrpo`` or ``branchgrpo@digits``.

    Raises:
        OptionError: an unknown name.
    """
    return read_config(preset=name)


def is_textual(key: str) -> bool:
    """Whether the option holds text, so that the override ``run.folder=2024`` means "2024"."""
    name = ".".join(part for part in key.split(".") if not part.isdecimal())
    kind = optional(leaves().get(name))[0]
    return kind is str or get_origin(kind) is Literal


def config_from(tree: Mapping[str, Any]) -> TrainConfig:
    """A configuration from nested tables, as TOML or JSON holds them.

    Raises:
        OptionError: an unknown option, a value of the wrong type, or one that is not legal.
    """
    result: TrainConfig = made(TrainConfig, tree, "")
    return result


def made(kind: Any, value: object, path: str) -> Any:
    """A ``kind`` from what TOML holds: tables, lists, text, numbers; ``""`` is None where None is legal.

    Raises:
        OptionError: a key that a table does not have, a value of the wrong type, or one that is not legal.
    """
    inner, may_be_none = optional(kind)
    row = row_kind(inner)
    if may_be_none and (value is None or value == ""):
        return None
    if row is not None and isinstance(value, list | tuple):
        return tuple(made(row, part, f"{path}[{i}]") for i, part in enumerate(value))
    if is_dataclass(inner) and isinstance(value, Mapping):
        kinds = members(inner)
        for key in value:
            if key not in kinds:
                raise unknown(f"{path}.{key}" if path else str(key), value[key])
        build: Any = inner
        parts = {key: made(kinds[key], part, f"{path}.{key}" if path else key) for key, part in value.items()}
        try:
            return build(**parts)
        except OptionError as error:  # a table of a list does not know which it is
            name = error.field.replace(re.sub(r"\[\d+\]", "", path), path, 1)
            raise OptionError(name, error.value, error.legal) from None
    return typed(inner, tuple(value) if isinstance(value, list) else value, path)


def unknown(name: str, value: object) -> OptionError:
    """The error for an option that does not exist."""
    close = nearest(name)
    hint = f"did you mean {close}?" if close else "`branchgrpo train --print-config` lists every option"
    return OptionError(name, short(value), f"left out, for it is unknown: {hint}")


def as_toml(config: TrainConfig) -> str:
    """Every option as TOML; ``config_from`` of what it says is equal to ``config``."""
    import tomlkit

    return HEADER + tomlkit.dumps(as_tables(config))


def as_tables(config: TrainConfig) -> dict[str, Any]:
    """Every option as nested tables of text, numbers, flags and lists."""
    tables: dict[str, Any] = without_none(asdict(config))
    return tables


def without_none(value: Any) -> Any:
    """Tables as TOML can hold them: None as ``""``, tuples as lists; a table's own tables come last, as they must."""
    if isinstance(value, Mapping):
        return {key: without_none(value[key]) for key in sorted(value, key=lambda key: holds_tables(value[key]))}
    if isinstance(value, list | tuple):
        return [without_none(part) for part in value]
    return "" if value is None else value


def holds_tables(value: Any) -> bool:
    """Whether TOML writes a value under a header of its own: a table, or a list of them."""
    return isinstance(value, Mapping) or (
        isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(part, Mapping) for part in value)
    )


def write_config(config: TrainConfig, path: Path | str) -> None:
    """Write every option as TOML; the file is the old one or the whole new one.

    Raises:
        InputError: the folder is missing or cannot be written.
    """
    path, text = Path(path), as_toml(config)
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise InputError("config", str(path), f"a file that can be written ({error.strerror})") from None


def config_hash(config: TrainConfig) -> str:
    """SHA-256 over the options that change a run's numbers: runs with one hash do the same arithmetic.

    The length of a run counts where the learning rate's schedule is stretched over it.
    """
    values = {name: value_at(config, name) for name, effect in EFFECTS.items() if "numbers" in effect.changes}
    if config.optimizer.schedule != "constant":
        values["run.iterations"] = config.run.iterations
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def value_at(config: TrainConfig, name: str) -> Any:
    """The value of an option by its dotted name; of a table that is not there None, of ``rewards`` one a table."""
    value: Any = config
    for part in name.split("."):
        if value is None:
            return None
        value = [getattr(row, part) for row in value] if isinstance(value, tuple) else getattr(value, part)
    return value
