"""Torch's deterministic algorithms, for a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Without this variable a CUDA device's matrix products are refused in deterministic mode."""


@contextmanager
def deterministic_algorithms(*, poisoned: bool = False) -> Iterator[None]:
    """Deterministic algorithms only, in a block; what was set before is put back after it.

    Args:
        poisoned: fill fresh memory with NaN, or the largest integer, so that a read before a write shows.
    """
    filling: Any = torch.utils.deterministic
    enabled, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill, workspace = filling.fill_uninitialized_memory, os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = poisoned
    try:
        yield
    finally:
        filling.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(enabled, warn_only=warn)
        if workspace is None:
            os.environ.pop(WORKSPACE, None)
