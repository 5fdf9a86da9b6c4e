"""Noise passed in to code that draws its own: the calls by which it draws are answered with given numbers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from branchgrpo.reference.errors import InputError

DRAWS: frozenset[Callable[..., Any]] = frozenset(
    {torch.randn, torch.randn_like, torch.normal, torch.Tensor.normal_, torch.nn.init.normal_}
)
"""The ways in which PyTorch code asks for normal numbers; diffusers' ``randn_tensor`` calls the first."""

UNIFORM: frozenset[Callable[..., Any]] = frozenset({torch.rand, torch.rand_like, torch.Tensor.uniform_})
"""Draws that no standard normal number can answer: refused, so that nothing random slips through."""


class InjectedNoise(TorchFunctionMode):
    """Inside the block every standard normal draw is the next of the given tensors, and no other draw is allowed.

    For wrapped code that calls ``torch.randn`` or ``torch.randn_like`` itself, with or without a generator:

    >>> with InjectedNoise([torch.zeros(2)]):
    ...     torch.randn(2)
    tensor([0., 0.])

    Args:
        tensors: one a draw, in the order in which the code draws.

    Raises:
        InputError: a draw of another shape, more draws than tensors, or draws that are left over at the end.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.tensors = list(tensors)
        self.used = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer a draw, or do what is asked."""
        if func in UNIFORM or (func in DRAWS and func not in (torch.randn, torch.randn_like)):
            raise InputError("draw", getattr(func, "__name__", func), "torch.randn or torch.randn_like")
        if func not in DRAWS:
            return func(*args, **(kwargs or {}))
        options = dict(kwargs or {})
        options.pop("generator", None)
        like = torch.empty_like if func is torch.randn_like else torch.empty
        return self.answer(like(*args, **options))

    def answer(self, wanted: Tensor) -> Tensor:
        """The next tensor, in the dtype and on the device that are asked for."""
        if self.used == len(self.tensors):
            raise InputError("draws", f"more than {self.used}", "as many as the adapter expects")
        found = self.tensors[self.used]
        self.used += 1
        if found.shape != wanted.shape:
            raise InputError(f"draw {self.used - 1}: shape", tuple(wanted.shape), f"{tuple(found.shape)}")
        return found.to(dtype=wanted.dtype, device=wanted.device)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        """Leave the block; without an error every tensor must have been drawn."""
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        if kind is None and self.used != len(self.tensors):
            raise InputError("draws", self.used, f"{len(self.tensors)}, as many as the adapter expects")
