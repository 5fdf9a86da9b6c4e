"""Whole tensors from sharded ones, and back: a checkpoint knows nothing of the number of ranks."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from branchgrpo.training.checkpoint.errors import CheckpointError


def whole(tensor: Tensor, keep: bool = True) -> Tensor | None:
    """A copy in the CPU's memory; the shards of an FSDP2 tensor are gathered (a collective: every rank calls it).

    Args:
        tensor: plain, or a ``DTensor``.
        keep: whether this rank wants the copy; None is returned otherwise.
    """
    gathered = tensor.detach()
    if isinstance(gathered, DTensor):
        gathered = gathered.full_tensor()
    return gathered.to("cpu", copy=True).contiguous() if keep else None


def collect(named: Iterable[tuple[str, Tensor]], keep: bool = True) -> dict[str, Tensor]:
    """Copies of named tensors, one gathered after another; empty where ``keep`` is False."""
    copies = ((name, whole(tensor, keep)) for name, tensor in named)
    return {name: copy for name, copy in copies if copy is not None}


def like(value: Tensor, target: Tensor) -> Tensor:
    """A copy of a whole tensor, on the device of ``target`` and sharded as it is; the dtype stays."""
    if isinstance(target, DTensor):
        ready = value.to(target.device, copy=True)
        return distribute_tensor(ready, target.device_mesh, target.placements, src_data_rank=None)
    return value.to(target.device, copy=True)


def trained_state(network: nn.Module) -> dict[str, Tensor]:
    """What training changes: the trainable parameters if others are frozen (LoRA), the whole state otherwise."""
    parameters = dict(network.named_parameters())
    if all(parameter.requires_grad for parameter in parameters.values()):
        return dict(network.state_dict())
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


def check_fit(what: str, saved: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> None:
    """Every tensor is there with its shape and dtype, and no other.

    Raises:
        CheckpointError: names the first that are missing, unknown or of another shape or dtype.
    """
    missing, unknown = sorted(present.keys() - saved.keys()), sorted(saved.keys() - present.keys())
    if missing or unknown:
        found = f"without {missing[:3]} ({len(missing)}), with {unknown[:3]} ({len(unknown)})"
        raise CheckpointError(f"checkpoint: names of {what}", found, f"the {len(present)} of this model")
    for name, tensor in present.items():
        there, here = (tuple(saved[name].shape), saved[name].dtype), (tuple(tensor.shape), tensor.dtype)
        if there != here:
            raise CheckpointError(f"checkpoint: {what} {name}", there, f"{here}, as in this model")


@torch.no_grad()
def put(what: str, saved: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into present ones, after all of them were checked.

    Raises:
        CheckpointError: see ``check_fit``.
    """
    check_fit(what, saved, present)
    for name, tensor in present.items():
        tensor.copy_(like(saved[name], tensor))
