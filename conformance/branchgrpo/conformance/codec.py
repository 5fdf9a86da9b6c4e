"""Strict JSON for plans and options: every key known, every key present, no NaN and no infinity (TRACE-6)."""

import math
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar

from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.reference.options import DepthWindow, ExtremeB, ParentTop1, PruningRule
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput

Options = TypeVar("Options")
RULES: dict[str, type[PruningRule]] = {"parent_top1": ParentTop1, "extreme_b": ExtremeB, "depth_window": DepthWindow}


def encode(value: Any) -> Any:
    """A dataclass, tuple or scalar as JSON data; an infinity becomes ``"inf"`` (TRACE-6)."""
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def encode_rule(rule: PruningRule) -> dict[str, Any]:
    """A pruning rule with its name under ``rule``."""
    name = next(name for name, kind in RULES.items() if isinstance(rule, kind))
    return {"rule": name, **encode(rule)}


def check_keys(data: Any, expected: set[str], where: str) -> Mapping[str, Any]:
    """Return ``data`` if it is an object with exactly the expected keys.

    Raises:
        InputError: names the first key that is missing or unknown.
    """
    if not isinstance(data, Mapping):
        raise InputError(where, type(data).__name__, "a JSON object")
    for key in sorted(expected - set(data)):
        raise InputError(f"{where}.{key}", "missing", "present")
    for key in sorted(set(data) - expected):
        raise InputError(f"{where}.{key}", "present", f"one of {sorted(expected)}")
    return data


def real(value: Any, where: str) -> float:
    """A number, or ``"inf"``."""
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(where, value, "a number or the string 'inf'")
    return float(value)


def reals(values: Any, where: str) -> tuple[float, ...]:
    """A list of numbers."""
    return tuple(real(value, f"{where}[{i}]") for i, value in enumerate(items(values, where)))


def integer(value: Any, where: str) -> int:
    """An integer that is not a bool."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(where, value, "an integer")
    return value


def integers(values: Any, where: str) -> tuple[int, ...]:
    """A list of integers."""
    return tuple(integer(value, f"{where}[{i}]") for i, value in enumerate(items(values, where)))


def text(value: Any, where: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise InputError(where, value, "a string")
    return value


def items(value: Any, where: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise InputError(where, type(value).__name__, "a JSON array")
    return value


def decode_options(kind: type[Options], data: Any, where: str) -> Options:
    """A flat options dataclass; its own validation refuses values that are out of range."""
    known = check_keys(data, {field.name for field in fields(kind)}, where)  # type: ignore[arg-type]
    try:
        return kind(**{key: math.inf if value == "inf" else value for key, value in known.items()})
    except (TypeError, OverflowError):
        raise InputError(where, dict(known), "values of the types that spec/trace.md gives") from None
    except (InputError, OptionError) as error:
        raise type(error)(f"{where}.{error.field.partition('.')[2] or error.field}", error.value, error.legal) from None


def decode_rule(data: Any, where: str) -> PruningRule:
    """A pruning rule by its name under ``rule``."""
    if not isinstance(data, Mapping) or not isinstance(data.get("rule"), str) or data["rule"] not in RULES:
        raise InputError(
            f"{where}.rule", data if not isinstance(data, Mapping) else data.get("rule"), f"one of {list(RULES)}"
        )
    rest = {key: value for key, value in data.items() if key != "rule"}
    return decode_options(RULES[data["rule"]], rest, where)


def decode_plan(data: Any, where: str = "plan") -> Plan:
    """A plan, checked as on construction."""
    d = check_keys(data, {field.name for field in fields(Plan)}, where)
    kernels = [
        check_keys(k, {"kind", "eta"}, f"{where}.kernels[{i}]")
        for i, k in enumerate(items(d["kernels"], f"{where}.kernels"))
    ]
    trained = d["trained_steps"]
    return Plan(
        sigmas=reals(d["sigmas"], f"{where}.sigmas"),
        kernels=tuple(decode_kernel(k, f"{where}.kernels[{i}]") for i, k in enumerate(kernels)),
        branching=integers(d["branching"], f"{where}.branching"),
        spreads=reals(d["spreads"], f"{where}.spreads"),
        roots=integer(d["roots"], f"{where}.roots"),
        output=decode_output(d["output"], f"{where}.output"),
        trained_steps=None if trained is None else integers(trained, f"{where}.trained_steps"),
        trained_fraction=real(d["trained_fraction"], f"{where}.trained_fraction"),
    )


def decode_kernel(data: Mapping[str, Any], where: str) -> Kernel:
    """A kernel by the name of its kind."""
    if data["kind"] not in [kind.value for kind in KernelKind]:
        raise InputError(f"{where}.kind", data["kind"], f"one of {[kind.value for kind in KernelKind]}")
    return Kernel(KernelKind(data["kind"]), real(data["eta"], f"{where}.eta"))


def decode_output(value: Any, where: str) -> LeafOutput:
    """The leaf output rule by name."""
    if value not in [output.value for output in LeafOutput]:
        raise InputError(where, value, f"one of {[output.value for output in LeafOutput]}")
    return LeafOutput(value)
