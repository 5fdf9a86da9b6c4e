"""Errors that name the field, the value found and what is legal (spec: errors, ERR-1)."""


class BranchGRPOError(ValueError):
    """Bad input. The message reads ``field = value: must be legal``.

    Attributes:
        field: the argument, option or array at fault, with its index where it has one.
        value: what was found there.
        legal: what would have been accepted.
    """

    def __init__(self, field: str, value: object, legal: str) -> None:
        self.field = field
        self.value = value
        self.legal = legal
        super().__init__(f"{field} = {value!r}: must be {legal}")

    def __reduce__(self) -> tuple[type, tuple[str, object, str]]:
        """Rebuild from the three parts, so that the error crosses process boundaries."""
        return type(self), (self.field, self.value, self.legal)


class PlanError(BranchGRPOError):
    """A plan, plan family, window or schedule that cannot be rolled out."""


class OptionError(BranchGRPOError):
    """An option of fusion, normalization, pruning, objective or a preset that is unknown or out of range."""


class InputError(BranchGRPOError):
    """A tensor or condition whose shape, dtype or batch does not match the call."""


class ModelError(BranchGRPOError):
    """A model that returned another shape or dtype family, or a non-finite value."""


class RewardError(BranchGRPOError):
    """Rewards of the wrong length, or a reward that is not a finite real."""


def is_integer(value: object) -> bool:
    """Whether ``value`` is an int and not a bool, which Python counts among the ints.  Clause: ERR-1."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_latent_shape(shape: tuple[int, ...]) -> None:
    """Raise ``InputError`` unless ``shape`` has at least one dimension, all of them ≥ 1.  Clause: ERR-3."""
    if len(shape) == 0 or not all(is_integer(n) and n >= 1 for n in shape):
        raise InputError("latent_shape", shape, "integers ≥ 1, at least one")
