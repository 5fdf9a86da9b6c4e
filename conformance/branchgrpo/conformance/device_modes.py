"""Global modes of torch, each set for a block and put back: TF32, a compiled step."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo.utils import counters

from branchgrpo.conformance.checks.base import UnsupportedError
from branchgrpo.reference.implementation import Implementation

TF32_SINCE = (8, 0)
"""The first compute capability with TF32."""


def require_tf32(device: torch.device) -> None:
    """Refuse a device that has no TF32.

    Raises:
        UnsupportedError: the CPU, or a device that is too old.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < TF32_SINCE:
        raise UnsupportedError(f"no TF32 on {device}: CUDA devices of compute capability 8.0 and above have it")


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Matrix products of float32 with or without TF32; the network and the algorithm have no convolutions."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def compiling(implementation: Implementation) -> Iterator[None]:
    """The implementation's flag ``compile`` set for a block in which something must be compiled.

    Raises:
        UnsupportedError: it has no such flag, or nothing was compiled in the block.
    """
    before = getattr(implementation, "compile", None)
    if not isinstance(before, bool):
        raise UnsupportedError("the implementation has no flag compile")
    torch.compiler.reset()
    graphs = counters["stats"]["unique_graphs"]
    implementation.compile = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield
    finally:
        implementation.compile = before  # type: ignore[attr-defined]
    if counters["stats"]["unique_graphs"] == graphs:
        reasons = [str(warning.message) for warning in warned if "compile" in str(warning.message)]
        raise UnsupportedError("; ".join(["nothing was compiled", *reasons[:1]]))
