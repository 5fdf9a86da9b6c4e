"""The base of adapters that bring only some operations: what a class defines is what it can do (TRACE-4)."""

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.conformance.checks.base import UnsupportedError
from branchgrpo.reference.errors import InputError, ModelError
from branchgrpo.reference.implementation import CAPABILITIES
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, VelocityModel
from branchgrpo.reference.types import KernelKind


class PartialImplementation:
    """An implementation whose capabilities are the operations that its class defines.

    An operation that can do some of what it is asked, and not this, raises ``UnsupportedError``: the clause is then
    reported as unsupported, neither passed nor failed.

    Attributes:
        name: what the report calls it.
        spec_version: version of the specification that it was written against.
    """

    name = "unnamed"
    spec_version = "1.0"

    @property
    def capabilities(self) -> frozenset[str]:
        """The operations of the protocol that the object has."""
        return frozenset(name for name in CAPABILITIES if callable(getattr(self, name, None)))


def own_operations(implementation: PartialImplementation, base: type[PartialImplementation]) -> frozenset[str]:
    """The operations that an adapter's class, or the object itself, defines beyond a base that has some of its own."""
    return frozenset(
        name
        for name in CAPABILITIES
        if callable(getattr(implementation, name, None))
        and (name in vars(implementation) or getattr(type(implementation), name, None) is not getattr(base, name, None))
    )


def undefined(implementation: PartialImplementation, hook: str) -> NotImplementedError:
    """What a base's hook raises where the subclass defines none and an operation needs it."""
    return NotImplementedError(f"{type(implementation).__name__} defines no {hook}, which this operation needs")


def require(holds: bool, what: str) -> None:
    """Raise ``UnsupportedError`` unless the wrapped code can do what is asked.

    Args:
        holds: whether it can.
        what: the reason, as the report prints it.
    """
    if not holds:
        raise UnsupportedError(what)


def require_kernels(plan: Plan, kinds: frozenset[KernelKind]) -> None:
    """Raise ``UnsupportedError`` if a step has a kernel that the wrapped code lacks; ODE steps are η = 0."""
    for kernel in plan.effective_kernels:
        require(kernel.kind in kinds or kernel.kind is KernelKind.ODE, f"no kernel {kernel.kind.value}")


def checked_velocity(
    model: VelocityModel, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
) -> Float[Tensor, "items *latent"]:
    """The model's velocity, for adapters that call it themselves: refused where its shape or a value is wrong (ERR-3).

    Raises:
        InputError: a condition of another number of items.
        ModelError: another shape, or a non-finite value.
    """
    if len(condition) != len(x):
        raise InputError("len(condition)", len(condition), f"{len(x)}, one an item")
    velocity = model(x, sigma, condition)
    if velocity.shape != x.shape:
        raise ModelError("velocity: shape", tuple(velocity.shape), f"{tuple(x.shape)}")
    if not bool(torch.isfinite(velocity).all()):
        raise ModelError("velocity", "NaN or ±inf", "finite")
    return velocity
