"""Packages that only some rewards need: imported when they are, and named with their extra when they are absent."""

from importlib import import_module
from typing import Any

from branchgrpo.reference.errors import InputError


def require(module: str, extra: str) -> Any:
    """The module.

    Args:
        module: name to import.
        extra: the optional dependencies of this project that bring it.

    Raises:
        InputError: it cannot be imported, with the line that installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(module, str(error), f"importable: pip install 'branchgrpo[{extra}]'") from error
