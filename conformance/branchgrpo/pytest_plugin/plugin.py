"""The pytest plugin: options that name the implementation, and the fixtures of the suite.

Nothing of ours is imported while this module loads, and it has a package of its own: pytest loads plugins before the
import hooks that check types are installed, and a package that is imported too early escapes them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("branchgrpo", "conformance of an implementation of tree-structured GRPO")
    group.addoption(
        "--branchgrpo-impl",
        action="append",
        metavar="MODULE:OBJECT",
        help="implementation to judge: module:Object, or optimized (default), reference, plain; properties: several",
    )
    group.addoption("--branchgrpo-device", metavar="DEVICE", default="cpu", help="torch device (default: cpu)")
    group.addoption(
        "--branchgrpo-xfails", metavar="FILE", default=None, help="expected failures, lines CLAUSE  # reason"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker of the specification's clauses."""
    config.addinivalue_line("markers", "clause(id): the clause of the specification that a check judges")


@pytest.fixture(scope="session")
def branchgrpo_subject(request: pytest.FixtureRequest) -> Any:
    """The implementation on its device; without a CUDA device tests of it are skipped."""
    from branchgrpo.conformance.subject_loading import load_subject

    device = request.config.getoption("--branchgrpo-device")
    if device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device on this machine")
    names = request.config.getoption("--branchgrpo-impl") or ["optimized"]
    if len(names) > 1:
        raise pytest.UsageError(f"conformance judges one implementation, --branchgrpo-impl names {len(names)}")
    return load_subject(names[0], device)


@pytest.fixture(scope="session")
def branchgrpo_records(branchgrpo_subject: Any) -> Any:
    """Records of every case, and the results of driving them."""
    from branchgrpo.conformance.judge import drive_cases

    return drive_cases(branchgrpo_subject, lambda name: None)


@pytest.fixture(scope="session")
def branchgrpo_xfails(request: pytest.FixtureRequest) -> Mapping[str, str]:
    """Clauses that may fail, with reasons."""
    from branchgrpo.conformance.report import read_xfails

    path = request.config.getoption("--branchgrpo-xfails")
    return read_xfails(None if path is None else Path(path))
