"""Runs with deterministic algorithms: asked for, put back, and the same bits after a resume."""

import os
from pathlib import Path

import pytest
import torch
from helpers_training import numbers, run_small, weights_of

from branchgrpo.reference.errors import OptionError
from branchgrpo.training.engine.loop import Hooks


def test_deterministic_algorithms_are_asked_for_and_put_back(tmp_path: Path) -> None:
    def asked() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), "CUBLAS_WORKSPACE_CONFIG" in os.environ

    def broken(iteration: int, metrics: object) -> None:
        seen.append(asked())
        raise OptionError("run", iteration, "broken off")

    before, seen = asked(), []  # type: ignore[var-annotated]
    assert not before[0]
    run_small(tmp_path / "no", hooks=Hooks(on_iteration=lambda *_: seen.append(asked())))
    assert set(seen) == {before}
    with pytest.raises(OptionError, match="broken off"):
        run_small(tmp_path / "yes", "run.deterministic=true", hooks=Hooks(on_iteration=broken))
    assert seen[-1] == (True, True)
    assert asked() == before


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_deterministic_run_that_is_resumed_equals_the_whole_one(device: str, tmp_path: Path) -> None:
    options = ("run.deterministic=true", f"run.device={device}", "rollout.noise=fast", "update.micro_batch=5")
    run_small(tmp_path / "cut", *options, "run.iterations=2")
    run_small(tmp_path / "cut", *options, resume=True)
    run_small(tmp_path / "whole", *options)
    cut, whole = weights_of(tmp_path / "cut"), weights_of(tmp_path / "whole")
    assert all(torch.equal(cut[name], whole[name]) for name in cut | whole)
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
