"""What is audited beside the implementation: the plan, backbone, dtypes and noise source of a run, from TOML."""

import math
import tomllib
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from branchgrpo.reference.errors import InputError, OptionError, check_latent_shape, is_integer
from branchgrpo.reference.presets import PRESETS
from branchgrpo.reference.types import Reduction

CONFIG_LIMIT = 2**20
"""Bytes of a configuration that are read."""

DTYPES = ("float64", "float32", "bfloat16", "float16")
BACKBONES = ("gaussian", "network", "digits")
NOISES = ("keyed", "fast")


@dataclass(frozen=True)
class AuditConfig:
    """The table ``[audit]`` of a run's TOML file.

    Attributes:
        preset: name of a published method; its plan, reduction and options are audited.
        plan: a JSON file with the key ``plan`` of spec/trace.md's records, in place of the preset's plan; "" for none.
        backbone: ``gaussian`` (exact velocity of Gaussian data), ``network`` (small, seeded), ``digits`` (the demo's
            generator, trained if need be), or the folder of a diffusers pipeline.
        dtype: of the arithmetic.
        storage_dtype: of stored states.
        noise: ``keyed`` (NumPy's Philox, NOISE-4) or ``fast`` (made on the device, NOISE-5).
        log_prob: reduction of log-probabilities, ``mean`` or ``sum``; "" takes the preset's.
        seed: of noise, windows and subsets.
        iteration: of the run, which windows depend on.
        prompts: number of prompts.
        latent: shape of a state; ignored by ``digits``, whose images are 1 × 8 × 8.
    """

    preset: str = "branchgrpo"
    plan: str = ""
    backbone: str = "gaussian"
    dtype: str = "float32"
    storage_dtype: str = "float32"
    noise: str = "keyed"
    log_prob: str = ""
    seed: int = 0
    iteration: int = 0
    prompts: int = 2
    latent: tuple[int, ...] = (4, 16, 16)

    def __post_init__(self) -> None:
        check_name("preset", self.preset, tuple(PRESETS))
        check_name("dtype", self.dtype, DTYPES)
        check_name("storage_dtype", self.storage_dtype, DTYPES)
        check_name("noise", self.noise, NOISES)
        check_name("log_prob", self.log_prob, ("", *(kind.value for kind in Reduction)))
        if self.backbone not in BACKBONES and not Path(self.backbone).is_dir():
            check_name("backbone", self.backbone, BACKBONES, "or the folder of a diffusers pipeline")
        for name, low in (("seed", 0), ("iteration", 0), ("prompts", 1)):
            if not is_integer(getattr(self, name)) or getattr(self, name) < low:
                raise OptionError(f"audit.{name}", getattr(self, name), f"an integer ≥ {low}")
        check_latent_shape(self.latent)

    @property
    def elements(self) -> int:
        """D, elements of a state."""
        return 64 if self.backbone == "digits" else math.prod(self.latent)


def check_name(field: str, value: object, names: tuple[str, ...], more: str = "") -> None:
    """Refuse a name that is none of ``names``, with the nearest of them.

    Raises:
        OptionError: an unknown name.
    """
    if value in names:
        return
    near = get_close_matches(str(value), names, n=1, cutoff=0.5)
    known = ", ".join(name for name in names if name)
    legal = f"{near[0]!r}?" if near else f"one of {known[:300]} {more}".strip()
    raise OptionError(f"audit.{field}", value, legal)


def read_document(path: Path) -> dict[str, Any]:
    """A TOML file.

    Raises:
        InputError: a missing, huge or malformed file.
    """
    if not path.is_file():
        raise InputError("config", str(path), "an existing TOML file")
    if path.stat().st_size > CONFIG_LIMIT:
        raise InputError(f"size of {path.name}", path.stat().st_size, f"at most {CONFIG_LIMIT} bytes")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(path.name, str(error) or "nested too deeply", "valid TOML") from None


def read_config(path: Path) -> AuditConfig:
    """The table ``[audit]`` of a TOML file; its other tables are the run's own and not read.

    Raises:
        InputError: a missing, huge or malformed file, or one without the table.
        OptionError: an unknown key, by its nearest known one, or a value that is not legal.
    """
    return config_of(path, read_document(path))


def config_of(path: Path, document: dict[str, Any]) -> AuditConfig:
    """The table ``[audit]`` of a document that was read from ``path``.

    Raises:
        InputError: a document without the table.
        OptionError: an unknown key, by its nearest known one, or a value that is not legal.
    """
    table = document.get("audit")
    if not isinstance(table, dict):
        raise InputError(
            path.name,
            f"tables {sorted(document)}"[:200],
            "one with a table [audit], or the configuration of a training run",
        )
    return config_from(table)


def config_from(table: dict[str, Any]) -> AuditConfig:
    """A configuration from a table's keys.

    Raises:
        OptionError: an unknown key or an illegal value.
    """
    known = tuple(field.name for field in fields(AuditConfig))
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.5)
            raise OptionError(f"audit.{key}", table[key], f"left out, or {near[0]!r}" if near else f"one of {known}")
    return AuditConfig(**{key: typed(key, value) for key, value in table.items()})


def typed(key: str, value: Any) -> Any:
    """A value of the kind that its key's default is of.

    Raises:
        OptionError: another kind.
    """
    default = AuditConfig.__dataclass_fields__[key].default
    if isinstance(default, tuple):
        if isinstance(value, list) and all(is_integer(part) for part in value):
            return tuple(value)
        raise OptionError(f"audit.{key}", value, "a list of integers ≥ 1")
    if is_integer(default):
        if is_integer(value):
            return value
        raise OptionError(f"audit.{key}", value, "an integer")
    if isinstance(value, str):
        return value
    raise OptionError(f"audit.{key}", value, "a string")
