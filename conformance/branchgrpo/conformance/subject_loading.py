"""Finding the implementation to judge: ``module:Object``, or a short name of ours."""

import difflib
import importlib
import inspect
from typing import Any, cast

import torch

from branchgrpo.conformance.blame import describe
from branchgrpo.conformance.checks.base import Subject
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.implementation import CAPABILITIES, Implementation

SHORT = {
    "optimized": "branchgrpo.conformance.adapters.optimized:OptimizedImplementation",
    "reference": "branchgrpo.conformance.adapters.reference:ReferenceImplementation",
    "plain": "branchgrpo.conformance.mutants.plain:PlainImplementation",
}
"""Short names of the implementations that come with the project."""

PACKAGE = "branchgrpo."
NEAR = 0.8
"""How alike two names are, from 0 to 1, for one to be taken for the other mistyped."""


def load_implementation(name: str) -> Implementation:
    """Import and, if it is a class, construct an implementation.

    Args:
        name: ``module:Object``, or a short name.

    Raises:
        InputError: no such module or object, or an object that is no implementation.
    """
    path = SHORT.get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon or not module or not attribute:
        raise InputError("implementation", name, f"module:Object, or one of {', '.join(SHORT)}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise InputError("implementation", name, f"importable ({describe(error)})") from error
    made: Any = construct(found, name) if isinstance(found, type) else found
    for field in ("name", "spec_version", "capabilities"):
        if not hasattr(made, field):
            raise InputError(
                f"implementation {name}", f"no attribute {field!r}", "one with name, spec_version, capabilities"
            )
    strange = sorted(set(made.capabilities) - CAPABILITIES)
    if strange:
        raise InputError(f"{name}.capabilities", strange, f"operations of {sorted(CAPABILITIES)}")
    for operation in sorted(made.capabilities):
        if not callable(getattr(made, operation, None)):
            raise InputError(f"{name}.{operation}", "missing", "callable, since the capabilities name it")
    return cast(Implementation, made)


def construct(kind: type, name: str) -> object:
    """An instance of a class, made without arguments.

    Raises:
        InputError: a class that needs arguments, or whose construction fails.
    """
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise InputError("implementation", name, f"a class without arguments, or an object ({error})") from error
    except ValueError:  # a class without a signature
        pass
    try:
        return kind()
    except Exception as error:
        raise InputError("implementation", name, f"constructible without arguments ({describe(error)})") from error


def suspicious_names(implementation: Implementation) -> list[str]:
    """A line for each public method that looks like an operation, or a hook, under a name that nobody calls.

    Only what its own class defines is looked at: not the bases of this project, not what an operation already has.
    """
    kind, has = type(implementation), frozenset(implementation.capabilities)
    bases = [base for base in kind.__mro__ if base.__module__.startswith(PACKAGE)]
    defined = {name for base in kind.__mro__ if base not in (*bases, object) for name in vars(base)}
    inherited = {name for base in bases for name, member in vars(base).items() if callable(member)}
    wanted = sorted(((CAPABILITIES - has) | inherited) - defined)
    lines = []
    for name in sorted(defined - CAPABILITIES - inherited):
        near = difflib.get_close_matches(name, wanted, n=1, cutoff=NEAR)
        if near and not name.startswith("_") and callable(getattr(implementation, name, None)):
            lines.append(f"{kind.__name__}.{name} is no operation and is never called: did you mean {near[0]!r}?")
    for name in sorted((defined & CAPABILITIES) - has):
        lines.append(f"{kind.__name__}.{name} is never called: its capabilities do not name it")
    return lines


def load_subject(name: str, device: str = "cpu") -> Subject:
    """An implementation on a device.

    Raises:
        InputError: a device that torch does not know, or that is not there.
    """
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise InputError("device", device, "a torch device such as cpu or cuda") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device", device, "present: this machine has no CUDA device")
    implementation = load_implementation(name)
    if where.type != "cpu" and hasattr(implementation, "device"):
        implementation.device = where
    return Subject(implementation, where)
