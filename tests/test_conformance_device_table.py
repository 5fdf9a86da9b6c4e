"""The device table: the batched path passes on the CPU, planted faults fail their rows, modes are put back."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_optimized import shapes_unchecked

from branchgrpo.cli.main import main
from branchgrpo.conformance.adapters.optimized import OptimizedImplementation
from branchgrpo.conformance.checks.base import Subject, UnsupportedError
from branchgrpo.conformance.device_models import SMALL, VARIANTS, DeviceNetwork, truncated
from branchgrpo.conformance.device_modes import tf32
from branchgrpo.conformance.device_table import QUANTITIES, DeviceTable, compare, device_table, run
from branchgrpo.reference.implementation import Trace
from branchgrpo.training.engine.determinism import deterministic_algorithms

NAMED = {variant.name: variant for variant in VARIANTS}
EAGER = [variant for variant in VARIANTS if not variant.compiled]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    """Shapes are checked in the tests of the clauses; node by node on latents of this size that takes long."""
    with shapes_unchecked():
        yield


def statuses(table: DeviceTable) -> dict[tuple[str, str], str]:
    return {(row.variant, row.quantity): row.status for row in table.rows}


def failed(implementation: OptimizedImplementation, *variants: str) -> set[tuple[str, str]]:
    table = device_table(Subject(implementation), [NAMED[name] for name in variants])
    return {key for key, status in statuses(table).items() if status == "failed"}


class Changed(OptimizedImplementation):
    """The batched path with a rollout that is changed afterwards."""

    def rollout(self, *arguments: Any, **options: Any) -> Trace:
        return self.change(super().rollout(*arguments, **options))

    def change(self, trace: Trace) -> Trace:
        raise NotImplementedError


class Unwritten(Changed):
    """The last leaf's last row is never written: NaN in poisoned memory, else the number that an earlier run left."""

    def change(self, trace: Trace) -> Trace:
        leaves = trace.states[-1].clone()
        fresh = torch.empty_like(leaves[-1, -1:])
        if fresh.isnan().all():
            leaves[-1, -1:] = fresh
        return replace(trace, states=(*trace.states[:-1], leaves))


class Coarse(Changed):
    """Log-probabilities in bf16."""

    def change(self, trace: Trace) -> Trace:
        rounded = (None if level is None else level.bfloat16().double() for level in trace.log_probs)
        return replace(trace, log_probs=tuple(rounded))


class Restless(Changed):
    """Every other run differs by a few roundings."""

    runs = 0

    def change(self, trace: Trace) -> Trace:
        self.runs += 1
        return replace(trace, states=(*trace.states[:-1], trace.states[-1] * (1.0 + 1e-15 * (self.runs % 2))))


class Single(OptimizedImplementation):
    """States in float32 whatever is asked."""

    def rollout(self, *arguments: Any, **options: Any) -> Trace:
        return super().rollout(*arguments, **(options | {"storage_dtype": torch.float32}))


class Raising(OptimizedImplementation):
    """Raises as soon as it is asked for anything."""

    def rollout(self, *arguments: Any, **options: Any) -> Trace:
        raise ValueError("no trees today")


class Refused(Changed):
    """No deterministic algorithm: raises where only those are allowed."""

    def change(self, trace: Trace) -> Trace:
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("no deterministic implementation")
        return trace


def test_the_batched_path_passes_and_what_the_cpu_lacks_is_named() -> None:
    table = device_table(Subject(OptimizedImplementation()), EAGER)
    assert len(table.rows) == len(EAGER) * (len(QUANTITIES) + 2)
    for row in table.rows:
        lacking = row.variant == "float32 with TF32"
        assert row.status == ("unsupported" if lacking else "passed"), row
        if lacking:
            assert row.detail.startswith("no TF32 on cpu")
        elif row.quantity in QUANTITIES:
            assert row.error is not None
            assert row.bound is not None
            assert row.error <= row.bound
    by_key = {(row.variant, row.quantity): row for row in table.rows}
    sizes = [by_key[name, "states"].error or 0.0 for name in ("float64", "float32", "bf16 denoiser")]
    assert sizes[0] < 1e-14 < sizes[1] < 1e-6 < 1e-4 < sizes[2] < 1e-2  # every variant computes in its precision


def test_an_unwritten_row_fails_in_poisoned_memory_alone() -> None:
    """There the run ends with an error, for its reward is NaN; what the runs before it found stands."""
    table = device_table(Subject(Unwritten()), [NAMED["float64"], NAMED["bf16 denoiser"]])
    wrong = [row for row in table.rows if row.status != "passed"]
    assert [(row.variant, row.quantity) for row in wrong] == [
        ("float64", "poisoned memory"),
        ("bf16 denoiser", "poisoned memory"),
    ]
    assert all("= nan: must be finite" in row.detail for row in wrong)


def test_a_refusal_of_deterministic_algorithms_fails_the_rows_of_determinism_alone() -> None:
    assert failed(Refused(), "float64") == {("float64", "two runs"), ("float64", "poisoned memory")}


def test_coarse_log_probabilities_fail_in_every_precision() -> None:
    names = ("float64", "float32", "bf16 denoiser")
    found = failed(Coarse(), *names)
    assert {(name, "log_probs") for name in names} <= found
    assert not {key for key in found if key[1] in ("states", "two runs", "poisoned memory")}  # values are path weighted


def test_runs_that_differ_by_a_rounding_fail_and_pass_parity() -> None:
    found = failed(Restless(), "float64")
    assert found == {("float64", "two runs")}  # the third run, in poisoned memory, is like the first


def test_states_in_a_lower_precision_than_asked_fail() -> None:
    found = failed(Single(), "float64", "float32")
    assert {quantity for variant, quantity in found if variant == "float64"} >= {"states", "log_probs", "gradient"}
    assert not {key for key in found if key[0] == "float32"}


def test_exceptions_fail_every_row_and_missing_operations_are_unsupported() -> None:
    raising = device_table(Subject(Raising()), [NAMED["float32"]])
    assert {row.status for row in raising.rows} == {"failed"}
    assert all("no trees today" in row.detail for row in raising.rows)
    partial = OptimizedImplementation()
    partial.capabilities = frozenset({"rollout", "fuse"})
    table = device_table(Subject(partial), [NAMED["float64"]])
    by_quantity = {row.quantity: row for row in table.rows}
    assert [by_quantity[name].status for name in QUANTITIES] == ["passed"] * 3 + ["unsupported"] * 2
    assert by_quantity["gradient"].detail == "no operation normalize"
    assert by_quantity["two runs"].status == "passed"


def test_compiling_needs_a_flag() -> None:
    implementation = OptimizedImplementation()
    del implementation.compile
    table = device_table(Subject(implementation), [NAMED["compiled float64"]])
    assert {row.status for row in table.rows} == {"unsupported"}
    assert {row.detail for row in table.rows} == {"the implementation has no flag compile"}


def test_emulated_tf32_is_tf32() -> None:
    """Ten bits after the point; the bound that it gives lets TF32 pass and bf16 fail."""
    assert torch.equal(truncated(torch.tensor([1.0 + 2.0**-10, 1.0 + 2.0**-11])), torch.tensor([1.0 + 2.0**-10, 1.0]))
    variant = NAMED["float32 with TF32"]
    device = DeviceNetwork(variant, SMALL[0] * SMALL[1], emulated=True)
    low = DeviceNetwork(replace(variant, compute=torch.bfloat16), SMALL[0] * SMALL[1])
    rows, wrong = (compare(variant, run(OptimizedImplementation(), variant.case(CPU), net)) for net in (device, low))
    assert {row.status for row in rows} == {"passed"}
    assert next(row.error or 0.0 for row in rows if row.quantity == "gradient") > 1e-5
    assert next(row.status for row in wrong if row.quantity == "states") == "failed"


@pytest.mark.parametrize("before", [False, True])
def test_modes_are_put_back_even_after_an_error(before: bool) -> None:
    def modes() -> tuple[object, ...]:
        filling: Any = torch.utils.deterministic
        products = (torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision())
        repeated = (torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory)
        return *products, *repeated, os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    with tf32(before):
        kept = modes()
        device_table(Subject(OptimizedImplementation()), [NAMED["float32"]])
        assert modes() == kept
        assert kept[0] is before

        def broken() -> None:
            with tf32(not before), deterministic_algorithms(poisoned=True):
                assert modes() != kept
                assert torch.empty(3).isnan().all()
                raise UnsupportedError("enough")

        with pytest.raises(UnsupportedError, match="enough"):
            broken()
        assert modes() == kept


def test_the_command_prints_the_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The reference has no flag to compile, so nothing is compiled here."""
    assert main(["conformance", "--impl", "reference", "--table"]) == 0
    shown = capsys.readouterr().out
    assert "branchgrpo.reference on cpu against the reference in float64" in shown
    assert "unsupported float32 with TF32: no TF32 on cpu" in shown
    assert "21 passed, 21 unsupported" in shown
    assert main(["conformance", "--impl", "reference", "--table", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["device"] == "cpu"
    assert len(data["rows"]) == len(VARIANTS) * 7
    assert {"variant", "quantity", "status", "error", "bound", "plain_error", "floor", "detail"} == set(data["rows"][0])


@pytest.mark.parametrize("words", [["--vectors"], ["--trace", "x.safetensors"], ["--xfails", "x"], ["--junit", "x"]])
def test_options_of_clauses_do_not_go_with_the_table(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--table", *words]) == 2
    assert capsys.readouterr().err == (
        f"branchgrpo: error: {words[0]} does not go with --table, which judges no clauses\n"
    )


def test_a_table_of_a_device_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert main(["conformance", "--device", "cuda", "--table"]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err == "branchgrpo: error: device = 'cuda': must be present: this machine has no CUDA device\n"


@pytest.mark.slow
def test_the_compiled_path_passes_on_the_cpu() -> None:
    table = device_table(Subject(OptimizedImplementation()), [v for v in VARIANTS if v.compiled])
    assert {row.status for row in table.rows} == {"passed"}, table.rows


@pytest.mark.gpu
def test_the_batched_path_passes_on_a_cuda_device() -> None:
    device = torch.device("cuda", 0)
    table = device_table(Subject(OptimizedImplementation(device=device), device))
    assert [row for row in table.rows if row.status == "failed"] == []
    supported = {row.variant for row in table.rows if row.status == "passed"}
    assert {"float64", "float32", "bf16 denoiser", "compiled float64", "compiled float32"} <= supported
