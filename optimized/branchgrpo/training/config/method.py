"""From the table ``[method]`` to a method: a published one, and what differs from it."""

import inspect
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_type_hints

from branchgrpo.reference.errors import BranchGRPOError, OptionError, is_integer
from branchgrpo.reference.method import Method
from branchgrpo.reference.options import DepthWindow, ExtremeB, ParentTop1, PruningRule
from branchgrpo.reference.presets import PRESETS
from branchgrpo.reference.types import Reduction
from branchgrpo.training.config.checks import check_name, near
from branchgrpo.training.config.policy_tables import MethodConfig
from branchgrpo.training.config.typed import typed

RULES: dict[str, type[PruningRule]] = {"parent_top1": ParentTop1, "extreme_b": ExtremeB, "depth_window": DepthWindow}
"""Names of the pruning rules in ``method.settings.pruning``."""
LARGEST = 4096
"""Of the integers in ``method.settings``: steps, groups, splits."""


def setting_types(preset: str) -> dict[str, Any]:
    """The settings that a preset's builder takes, with their types."""
    builder = PRESETS[preset]
    plain_builder = getattr(builder, "func", builder)
    hints = get_type_hints(plain_builder)
    return {name: hints[name] for name in inspect.signature(builder).parameters if name != "name"}


def check_known(table: str, names: Mapping[str, object], known: Mapping[str, Any], whose: str) -> None:
    """Refuse a key that is not known, with the nearest one.

    Raises:
        OptionError: such a key.
    """
    for name in names:
        if name not in known:
            close = near(name, known)
            listed = ", ".join(known)
            hint = f"left out; did you mean {table}.{close}?" if close else f"left out; {whose} takes {listed}"
            raise OptionError(f"{table}.{name}", names[name], hint)


def check_size(field: str, value: object) -> None:
    """Refuse integers beyond ``LARGEST``, alone or in a list: they would fill the memory before anything is checked."""
    for part in value if isinstance(value, tuple) else (value,):
        if is_integer(part) and abs(part) > LARGEST:
            raise OptionError(field, value, f"integers of at most {LARGEST}")
    if isinstance(value, tuple) and len(value) > LARGEST:
        raise OptionError(field, len(value), f"a list of at most {LARGEST}")


def pruning_rule(field: str, table: object) -> PruningRule:
    """One rule of ``method.settings.pruning``, such as ``{rule = "extreme_b", b = 4}``.

    Raises:
        OptionError: an unknown rule, or an option that it does not take.
    """
    if not isinstance(table, Mapping) or "rule" not in table:
        raise OptionError(field, table, f"a table with rule = one of {', '.join(RULES)}")
    check_name(f"{field}.rule", table["rule"], RULES)
    kind = RULES[table["rule"]]
    options = {name: value for name, value in table.items() if name != "rule"}
    hints = get_type_hints(kind)
    check_known(field, options, {item.name: hints[item.name] for item in fields(kind)}, table["rule"])
    checked = {name: typed(hints[name], value, f"{field}.{name}") for name, value in options.items()}
    missing = [item.name for item in fields(kind) if item.name == "b" and "b" not in checked]
    missing += [item.name for item in fields(kind) if item.name == "start" and "start" not in checked]
    if missing:
        raise OptionError(f"{field}.{missing[0]}", None, "given")
    return kind(**checked)


def setting(name: str, value: Any, kind: Any) -> Any:
    """One argument of a preset's builder, checked against the type it has there."""
    field = f"method.settings.{name}"
    if name == "pruning":
        rules = value if isinstance(value, tuple) else (value,)
        return tuple(pruning_rule(f"{field}[{i}]", rule) for i, rule in enumerate(rules))
    check_size(field, value)
    return typed(kind, value, field)


def with_options(method: Method, table: str, values: Mapping[str, Any]) -> Any:
    """An option table of a method with some of its fields replaced.

    Raises:
        OptionError: an unknown field, or an illegal value.
    """
    options: Any = getattr(method, table)
    hints = get_type_hints(type(options))
    check_known(f"method.{table}", values, {item.name: None for item in fields(options)}, f"[method.{table}]")
    checked = {name: typed(hints[name], value, f"method.{table}.{name}") for name, value in values.items()}
    try:
        return replace(options, **checked)
    except BranchGRPOError as error:
        raise OptionError(f"method.{error.field}", error.value, error.legal) from None


def build_method(config: MethodConfig) -> Method:
    """The method that a run trains with.

    Raises:
        OptionError: a setting or option that is unknown, of the wrong type, or that makes no plan.
    """
    kinds = setting_types(config.preset)
    check_known("method.settings", config.settings, kinds, config.preset)
    settings = {name: setting(name, value, kinds[name]) for name, value in config.settings.items()}
    builder: Any = PRESETS[config.preset]
    try:
        method: Method = builder(config.preset, **settings)
        method.plan_at(0)
    except BranchGRPOError as error:
        raise OptionError(f"method.settings: {error.field}", error.value, error.legal) from None
    tables = ("fusion", "normalization", "objective")
    options = {table: with_options(method, table, getattr(config, table)) for table in tables}
    reduction = method.log_prob if config.log_prob is None else Reduction(config.log_prob)
    return replace(method, log_prob=reduction, **options)
