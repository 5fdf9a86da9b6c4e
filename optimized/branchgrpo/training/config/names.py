"""Configurations by name: published settings, and twins of them at a size for a CPU.

``branchgrpo`` is the published run, ``branchgrpo@digits`` the same method on the digits model, ``branchgrpo@tiny-flux``
on a tiny random FLUX. A twin's file holds what its runs share, and under ``[methods.NAME]`` what differs for a method.
"""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from branchgrpo.reference.errors import InputError, OptionError
from branchgrpo.training.config.checks import check_text, near
from branchgrpo.training.config.documents import laid_over, read_document

FOLDER = Path(__file__).resolve().parent / "presets"
DEEPEST = 8
"""Documents that may stand on each other through ``base``."""


@cache
def methods() -> tuple[str, ...]:
    """Published runs, by the name of their method."""
    return tuple(sorted(path.stem for path in (FOLDER / "methods").glob("*.toml")))


@cache
def twins() -> tuple[str, ...]:
    """What follows the @: the models that every method can be tried on."""
    return tuple(sorted(path.stem for path in (FOLDER / "twins").glob("*.toml")))


@cache
def preset_names() -> tuple[str, ...]:
    """All names that ``preset_document`` knows."""
    return tuple(f"{name}{at}" for name in methods() for at in ("", *(f"@{twin}" for twin in twins())))


@cache
def own_file(path: Path) -> dict[str, Any]:
    """One of the project's own files, read once."""
    return read_document(path)


def preset_document(name: str) -> dict[str, Any]:
    """The tables of a preset, without the defaults.

    Raises:
        OptionError: an unknown name, with the nearest one.
    """
    names = preset_names()
    if name not in names:
        close = near(name, names)
        listed = f"one of {', '.join(methods())}, alone or with @{', @'.join(twins())}"
        raise OptionError("preset", name, f"{close!r}?" if close else listed)
    method, _, twin = name.partition("@")
    published = on_its_base(own_file(FOLDER / "methods" / f"{method}.toml"), FOLDER / "methods", 0)
    if not twin:
        return deepcopy(published)
    document = dict(own_file(FOLDER / "twins" / f"{twin}.toml"))
    special: Mapping[str, Any] = document.pop("methods", {}).get(method, {})
    own = {"method": published["method"]}
    if "step_per" in published.get("update", {}):
        own["update"] = {"step_per": published["update"]["step_per"]}
    return deepcopy(laid_over(laid_over(document, own), special))


def on_its_base(document: Mapping[str, Any], folder: Path, depth: int) -> dict[str, Any]:
    """A document laid over the preset or TOML file that its key ``base`` names, and that over its own base.

    Args:
        document: as read.
        folder: where a relative path starts.
        depth: documents above this one.

    Raises:
        InputError: too many documents on each other, as when one names itself.
        OptionError: a base that is neither a preset nor a path.
    """
    rest = {key: value for key, value in document.items() if key != "base"}
    if "base" not in document:
        return rest
    check_text("base", document["base"], empty=False)
    if depth >= DEEPEST:
        raise InputError("base", document["base"], f"at most {DEEPEST} documents on each other")
    base = str(document["base"])
    if not base.endswith(".toml"):
        return laid_over(preset_document(base), rest)
    path = (folder / base).expanduser().resolve()
    below = own_file(path) if path.is_relative_to(FOLDER) else read_document(path)
    return laid_over(on_its_base(below, path.parent, depth + 1), rest)
