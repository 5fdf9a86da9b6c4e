"""A CUDA device for tests of placement: the numbers are the CPU's, the rules between devices are torch's.

``python helpers_pretend_cuda.py MODULE ARGUMENTS`` runs a module as ``python -m`` does, in a process that has one
device ``cuda:0``. Its tensors are of the class ``OnDevice``: ordinary CPU memory under a name of its own.

- ``OnDevice.__torch_dispatch__`` sees every operation that such a tensor takes part in, in backward passes too, and
  refuses what torch refuses: a CPU tensor beside it, but for the exceptions in ``misplaced``, and a CPU generator. What
  it lets pass is computed by the CPU's kernels, and what comes out is on the device.
- ``Factories``, a mode of the main thread, makes tensors where ``device=`` says. Copies to pinned memory that nobody
  waits for are *in flight* (``Flight``) until the next value is read from the device: to read that memory on the CPU
  meanwhile, which torch lets pass and answers with whatever is there, raises.
- ``install`` starts the mode, has ``.to`` and its like move between the two, and answers for ``torch.cuda``.

What it cannot show: kernels, streams, time, sizes of memory, TF32 (its capability is 7.0), and compiled code
(``torch.compile`` fails as dynamo does, so callers go on in eager mode). Its autocast is the CPU's: the lists of
operations differ. ``zeros_like`` and ``new_zeros`` of a tensor on the device are on the device, whatever ``device=``
they are given.
"""

import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
MIXED = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
NO_COMPILER = "the pretended device has no compiler"

aten = torch.ops.aten
ANYWHERE = {aten.copy_, aten.fill_}
"""Operations whose tensors may be on several devices."""

INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
"""Operations whose indices, a list in second place, may be on the CPU."""

SCALARS = {*INDEXED, aten.masked_fill, aten.masked_fill_}
"""Operations that take a 0-dimensional CPU tensor beside those of the device, as all pointwise ones do."""

WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations whose results the CPU waits for, indexing apart."""


class OnDevice(Tensor):
    """A tensor that says it is on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def type(self, dtype: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Name of the class, or the tensor in a dtype."""
        if dtype is None:
            return relabelled(self, False).type().replace("torch.", "torch.cuda.")
        return super().type(dtype, **kwargs)

    def get_device(self) -> int:
        """Index of the device."""
        return CUDA.index

    def numpy(self, *, force: bool = False) -> Any:
        """Refused as torch does, unless it is forced."""
        if not force:
            hint = "Use Tensor.cpu() to copy the tensor to host memory first."
            raise TypeError(f"can't convert {CUDA} device type tensor to numpy. {hint}")
        return relabelled(self, False).numpy(force=True)

    def tolist(self) -> Any:
        """The numbers."""
        FLIGHT.flying.clear()
        return relabelled(self, False).tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({relabelled(self, False)!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute on the CPU what the device would compute, and refuse what torch would refuse."""
        given = dict(kwargs or {})
        if getattr(given.get("device"), "type", None) == "cuda":
            given["device"] = torch.device("cpu")
        wrong = misplaced(func, args, given)
        if wrong:
            raise RuntimeError(wrong)
        with torch._C._DisableTorchDispatch():
            found = func(*args, **given)
        inputs = {id(leaf) for leaf in leaves(args, given)}
        if isinstance(found, (list, tuple)):
            return type(found)(leaf if id(leaf) in inputs else placed(leaf) for leaf in found)
        return found if id(found) in inputs else placed(found)


def leaves(args: Any, kwargs: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Any]:
    """The arguments of an operation, and what is in those that are lists."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def on_device(args: Any) -> bool:
    """Whether one of some arguments is on the device."""
    return any(isinstance(leaf, OnDevice) for leaf in leaves(args))


def placed(found: Any) -> Any:
    """A tensor under the device's name; anything else as it is."""
    plain = isinstance(found, Tensor) and not isinstance(found, OnDevice)
    return Tensor._make_subclass(OnDevice, found, found.requires_grad) if plain else found


def relabelled(tensor: Tensor, there: bool, *, copy: bool = False) -> Tensor:
    """The same memory, or a copy, under the name of the device (``there``) or of the CPU, cut from the graph."""
    with torch._C._DisableTorchDispatch():
        found = tensor.detach().clone() if copy else tensor.detach()
        return Tensor._make_subclass(OnDevice if there else Tensor, found)


def made_by_autograd() -> bool:
    """Whether autograd itself is at work: the zeros that it makes, for an output without a gradient, belong anywhere.

    It asks C++ for the device of a tensor, which is the CPU.
    """
    node = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, BackwardCFunction)


def plain_tensors(args: Any, kwargs: Mapping[str, Any] = MappingProxyType({})) -> list[Tensor]:
    """The CPU's tensors in arguments."""
    tensors = (leaf for leaf in leaves(args, kwargs) if isinstance(leaf, Tensor) and not isinstance(leaf, OnDevice))
    return [tensor for tensor in tensors if not hasattr(tensor, "of_autograd")]


@cache
def waits(func: OpOverload) -> bool:
    """Whether the CPU waits for an operation of the device."""
    return bool(WAITING & set(func.tags)) and func.overloadpacket not in INDEXED


def misplaced(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Why torch refuses an operation with a tensor on the device among its arguments; empty if it does not."""
    kind = func.overloadpacket
    if any(isinstance(leaf, torch.Generator) for leaf in leaves(args, kwargs)):
        return "Expected a 'cuda' device type for generator but found 'cpu'"
    if kind in ANYWHERE:
        return ""
    if kind in INDEXED:
        if not isinstance(args[0], OnDevice) and on_device(args[1]):
            return "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        args = (args[0], *args[2:])
    plain = plain_tensors(args, kwargs)
    if not plain:
        return ""
    scalars = kind in SCALARS or torch.Tag.pointwise in func.tags
    if not scalars or any(leaf.dim() > 0 for leaf in plain):
        return MIXED
    names = [argument.name for argument in func._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return MIXED if plain_tensors([values.get(name) for name in written]) else ""


class Flight:
    """Copies from the device to pinned memory that nobody has waited for.

    Attributes:
        pinned: pinned memory, by its address; it is kept, so that no address has two meanings.
        flying: addresses of what such a copy still writes.
    """

    def __init__(self) -> None:
        self.pinned: dict[int, torch.UntypedStorage] = {}
        self.flying: set[int] = set()

    def pin(self, tensor: Tensor) -> int:
        """Remember pinned memory; its address."""
        storage = tensor.untyped_storage()
        self.pinned[storage.data_ptr()] = storage
        return storage.data_ptr()

    def check(self, func: OpOverload, args: tuple[Any, ...]) -> None:
        """Refuse to read what is still written; views read nothing, ``copy_`` only its source."""
        read = args[1:] if func.overloadpacket is aten.copy_ else () if func.is_view else args
        if self.flying and any(t.untyped_storage().data_ptr() in self.flying for t in plain_tensors(read)):
            raise RuntimeError(f"{func} reads on the CPU what a copy from {CUDA} is still writing")

    def see(self, func: OpOverload, args: tuple[Any, ...]) -> None:
        """An operation that was done: another copy is in flight, or the CPU has waited for all."""
        if func.overloadpacket is aten.copy_ and isinstance(args[1], OnDevice) and not isinstance(args[0], OnDevice):
            address = args[0].untyped_storage().data_ptr()
            if len(args) > 2 and args[2] and address in self.pinned:
                self.flying.add(address)
            else:
                self.flying.clear()
        elif waits(func) and on_device(args):
            self.flying.clear()


FLIGHT = Flight()


class Factories(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tensors that are made from nothing are where ``device=`` says; copies in flight are watched."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what is asked, with the device taken out and seen to."""
        given = dict(kwargs or {})
        pinned, device = given.pop("pin_memory", None), given.get("device")
        if device is None or device.type != "cuda":
            FLIGHT.check(func, (*args, *given.values()))
            found = func(*args, **given)
            FLIGHT.see(func, args)
            if func is aten.zeros.default and made_by_autograd():
                found.of_autograd = True
            if pinned:
                FLIGHT.pin(found)
            return found
        if device.index not in (None, CUDA.index):
            raise RuntimeError("CUDA error: invalid device ordinal")
        if pinned:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        if given.get("generator") is not None:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        return placed(func(*args, **{**given, "device": torch.device("cpu")}))


class Move(torch.autograd.Function):
    """A copy on the other device, whose gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The copy."""
        return relabelled(x, not isinstance(x, OnDevice), copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The gradient, where the tensor came from."""
        return Move.forward(ctx, gradients[0])


def moved(x: Tensor, device: torch.device | str | int, non_blocking: bool = False) -> Tensor:
    """The tensor itself where it is there already, else a copy."""
    there = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if there.type not in ("cpu", "cuda") or there.index not in (None, CUDA.index):
        raise RuntimeError(f"CUDA error: invalid device {there}")
    if x.device.type == there.type:
        return x
    copied: Tensor = Move.apply(x)  # type: ignore[no-untyped-call]
    if non_blocking and there.type == "cpu":  # torch makes such copies in pinned memory
        FLIGHT.flying.add(FLIGHT.pin(copied))
    elif there.type == "cpu":
        FLIGHT.flying.clear()
    return copied


def moving(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``Tensor.to`` for both kinds of tensors: ``original`` sees to the dtype, on the device."""

    def to(self: Tensor, *args: Any, copy: bool = False, other: Tensor | None = None, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            other, args = args[0], args[1:]
        if other is not None:
            args = (other.device, other.dtype, *args)
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        there = self.device if device is None else device
        if "meta" in (self.device.type, there.type):
            return original(self, there, self.dtype if dtype is None else dtype, copy=copy)
        x = moved(self, there) if there.type == "cuda" else self
        x = original(x, self.dtype if dtype is None else dtype, copy=copy, memory_format=layout)
        return moved(x, there, non_blocking)

    return to


def built(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.tensor`` and its like: from numbers, with a device guard that a build without CUDA does not have."""

    def make(data: object, *, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        found = original(data, **kwargs)
        found = found if device is None else found.to(device)
        return found.requires_grad_() if requires_grad else found

    return make


def pinned(self: Tensor, device: object = None) -> Tensor:
    """A pinned copy."""
    if self.is_cuda:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    copied = self.clone()
    FLIGHT.pin(copied)
    return copied


class DeviceAutocast(torch.autocast):
    """Autocast of the device, which is the CPU's."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(device_type.replace("cuda", "cpu"), *args, **kwargs)


def refuse_compiling(function: Callable[..., Any], **options: object) -> Callable[..., Any]:
    """``torch.compile`` of something that cannot be compiled."""

    def call(*args: object, **kwargs: object) -> Any:
        raise torch._dynamo.exc.Unsupported(NO_COMPILER)

    return call


def install() -> None:
    """Give this process the device, for good."""
    changed: Any = Tensor
    changed.to, changed.pin_memory = moving(Tensor.to), pinned
    changed.cpu = lambda self, **kwargs: self.to("cpu", **kwargs)
    changed.cuda = lambda self, device=None, **kwargs: self.to(CUDA if device is None else device)
    changed.type_as = lambda self, other: self.to(other)
    answers: dict[str, Any] = {"get_device_capability": (7, 0), "is_bf16_supported": True}
    answers |= {"_lazy_init": None, "is_available": True, "device_count": 1, "current_device": 0, "set_device": None}
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    torch.cuda.synchronize = lambda device=None: FLIGHT.flying.clear()
    _device_constructors()  # keeps the functions themselves, not those below
    opened: Any = torch
    opened.tensor, opened.as_tensor = built(torch.tensor), built(torch.as_tensor)
    opened.autocast, opened.compile = DeviceAutocast, refuse_compiling
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the same objects when they move
    Factories().__enter__()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
