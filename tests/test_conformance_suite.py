"""The suite under pytest, as somebody who has only installed the package runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ADAPTER = """
from branchgrpo.conformance.adapters.partial import PartialImplementation
from branchgrpo.conformance.checks.levels import step_std


class Right(PartialImplementation):
    name = "right"

    def transition(self, plan, step, x, velocity):
        kernel, sigma, after = plan.effective_kernels[step], plan.sigmas[step], plan.sigmas[step + 1]
        std = step_std(kernel, sigma, after, plan.sigmas[1])
        if kernel.kind == "ode":
            return x - (sigma - after) * velocity, std
        if kernel.kind == "cps":
            import math

            kept = after * math.cos(math.pi * kernel.eta / 2)
            return (1 - after) * (x - sigma * velocity) + kept * (x + (1 - sigma) * velocity), std
        return x - (sigma - after) * velocity - std**2 / (2 * sigma) * (x + (1 - sigma) * velocity), std


class Wrong(Right):
    name = "wrong"

    def transition(self, plan, step, x, velocity):
        mean, std = super().transition(plan, step, x, velocity)
        return (mean, std) if plan.effective_kernels[step].kind != "cps" else (mean + 1e-6, std)
"""


def run(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of pytest on the suite, in a folder that knows nothing of the repository."""
    (folder / "somebody.py").write_text(ADAPTER, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rfsx",
        "--pyargs",
        "branchgrpo.conformance.suite.test_conformance",
        *words,
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    return done.returncode, done.stdout + done.stderr


def counted(output: str, word: str) -> int:
    """The number before a word in pytest's last line."""
    found = re.search(rf"(\d+) {word}", output.strip().splitlines()[-1])
    return int(found[1]) if found else 0


@pytest.mark.slow
def test_what_is_there_passes_and_what_is_missing_is_skipped(tmp_path: Path) -> None:
    code, output = run(tmp_path, "--branchgrpo-impl=somebody:Right")
    assert code == 0, output
    assert counted(output, "passed") == 4
    assert counted(output, "skipped") > 60
    assert "no operation rollout" in output


@pytest.mark.slow
def test_a_fault_fails_its_clause_alone_unless_it_is_expected(tmp_path: Path) -> None:
    code, output = run(tmp_path, "--branchgrpo-impl=somebody:Wrong")
    assert code == 1
    assert counted(output, "failed") == 1
    assert "KERN-4-cps_means_keep_the_coefficients" in output
    known = tmp_path / "known.txt"
    known.write_text("KERN-4  # of an older sampler\n", encoding="utf-8")
    code, output = run(tmp_path, "--branchgrpo-impl=somebody:Wrong", f"--branchgrpo-xfails={known}")
    assert code == 0, output
    assert counted(output, "xfailed") == 1
    assert "of an older sampler" in output


@pytest.mark.slow
def test_no_such_device_skips_and_no_such_implementation_is_an_error(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        code, output = run(tmp_path, "--branchgrpo-impl=somebody:Right", "--branchgrpo-device=cuda")
        assert code == 0
        assert counted(output, "passed") == 0
    code, output = run(tmp_path, "--branchgrpo-impl=somebody:Nobody")
    assert code == 1
    assert "must be importable" in output
