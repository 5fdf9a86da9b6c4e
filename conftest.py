"""What every test run shares: tests that need a GPU are skipped where there is none, and say so."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` on a machine without CUDA, with the reason that ``pytest -rs`` prints."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
