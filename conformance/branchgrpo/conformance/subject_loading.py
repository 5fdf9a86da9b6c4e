"""Finding the implementation to judge: ``module:Object``, or a short name of ours."""

import importlib
from typing import cast

import torch

from branchgrpo.conformance.checks.base import Subject
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.implementation import CAPABILITIES, Implementation

SHORT = {
    "optimized": "branchgrpo.conformance.adapters.optimized:OptimizedImplementation",
    "reference": "branchgrpo.conformance.adapters.reference:ReferenceImplementation",
    "plain": "branchgrpo.conformance.mutants.plain:PlainImplementation",
}
"""Short names of the implementations that come with the project."""


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
    except (ImportError, AttributeError) as error:
        raise InputError("implementation", name, f"importable ({error})") from error
    made = found() if isinstance(found, type) else found
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
