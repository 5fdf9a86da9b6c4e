"""What conformance says of an adapter that is wrong, incomplete or mistyped, and what adapters hand on unchanged."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from branchgrpo.cli.main import main
from branchgrpo.conformance.adapters.flat import FlatImplementation
from branchgrpo.conformance.adapters.functions import FunctionsImplementation, StepFunctions
from branchgrpo.conformance.adapters.partial import PartialImplementation
from branchgrpo.conformance.adapters.per_node import PerNodeImplementation
from branchgrpo.conformance.adapters.per_node_levels import part_of
from branchgrpo.conformance.adapters.reference import ReferenceImplementation
from branchgrpo.conformance.blame import describe
from branchgrpo.conformance.cases import all_cases
from branchgrpo.conformance.checks.base import CheckFailedError, Subject, expect_close, rounding_hint
from branchgrpo.conformance.checks.operation_tail import advantages_ignore_origin_and_scale
from branchgrpo.conformance.checks.trace_normalization import (
    advantages_are_depth_wise_scores,
    the_std_has_the_declared_denominator,
)
from branchgrpo.conformance.codec import decode_options, decode_rule
from branchgrpo.conformance.judge import not_judged, record_case
from branchgrpo.conformance.record import Dtypes
from branchgrpo.conformance.report import make_report
from branchgrpo.conformance.runner import Result
from branchgrpo.conformance.subject_loading import load_implementation, suspicious_names
from branchgrpo.reference.errors import InputError, OptionError

MODULE = """
from branchgrpo.conformance.adapters.partial import PartialImplementation
from branchgrpo.conformance.adapters.per_node import PerNodeImplementation


class Needs(PartialImplementation):
    def __init__(self, width):
        self.width = width


class Raises(PartialImplementation):
    def __init__(self):
        self.width = 1 / 0


class Typo(PartialImplementation):
    def transitions(self, plan, step, x, velocity):
        return x, 0.0


class Crash(PerNodeImplementation):
    name = "crash"

    def grow_tree(self, plan, model, condition, noise, storage_dtype, reduction):
        return helper(plan)

    def transition(self, plan, step, x, velocity):
        return x, 0.0


def helper(plan):
    return undefined_name
"""
LINE = next(i for i, line in enumerate(MODULE.splitlines(), start=1) if "undefined_name" in line)


@pytest.fixture
def somebody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of somebody else's, importable, and one that is no Python."""
    (tmp_path / "somebody_else.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "no_python.py").write_text("class Mine(:\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("somebody_else", None)
    return "somebody_else"


# ---- adapters hand on what they get ----------------------------------------------------------------------------------


class Leaf:
    """A node whose parts are of every kind."""

    def __init__(self, value: object) -> None:
        self.value = value


@pytest.mark.parametrize("value", [1.0 / 3.0, 7, [1.0 / 3.0], torch.tensor(1.0 / 3.0, dtype=torch.float64)])
def test_python_numbers_are_float64(value: object) -> None:
    found = part_of(Leaf(value), "value", 1)
    assert found.dtype is torch.float64
    assert torch.equal(found, torch.as_tensor(value, dtype=torch.float64))


def test_tensors_and_arrays_keep_their_dtype() -> None:
    single = torch.tensor([1.0 / 3.0])
    assert part_of(Leaf(single), "value", 1) is single
    assert part_of(Leaf(single.numpy()), "value", 1).dtype is torch.float32


@pytest.mark.parametrize(("name", "value"), [("value", None), ("value", "x"), ("worth", 1.0)])
def test_a_part_without_numbers_is_named(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{name} of a Leaf at depth 3 = .*NodeNames"):
        part_of(Leaf(value), name, 3)


def test_an_operation_that_the_class_defines_counts_without_its_hook() -> None:
    class Own(PerNodeImplementation):
        def normalize(self, *arguments: object) -> object:
            return arguments

        def fuse_tree(self, *arguments: object) -> None:
            """A hook."""

    class Chains(FlatImplementation):
        def prune(self, *arguments: object) -> object:
            return arguments

    class Script(FunctionsImplementation):
        def objective(self, *arguments: object) -> object:
            return arguments

    assert PerNodeImplementation().capabilities == frozenset()
    assert Own().capabilities == {"normalize", "fuse"}
    assert Chains().capabilities == {"rollout", "fuse", "prune"}
    assert Script(StepFunctions(step=print)).capabilities == {"transition", "rollout", "objective"}


# ---- messages --------------------------------------------------------------------------------------------------------


def test_an_exception_names_the_innermost_own_line_and_the_operation(somebody: str) -> None:
    crash = load_implementation(f"{somebody}:Crash")
    case = all_cases()["tree"]
    with pytest.raises(NameError) as caught:
        record_case(Subject(crash), case)
    assert describe(caught.value) == (
        f"NameError: name 'undefined_name' is not defined (somebody_else.py:{LINE}, in the operation rollout)"
    )
    assert describe(ValueError("x")) == "ValueError: x"


def test_a_hook_that_is_missing_is_named() -> None:
    class Half(PerNodeImplementation):
        def fuse_tree(self, *arguments: object) -> None:
            """A hook that needs another."""

    with pytest.raises(NotImplementedError, match="Half defines no make_node"):
        Half().make_node(None, torch.zeros(1), None, None, 0)


def test_one_fault_is_one_line_and_what_it_hides_is_not_judged() -> None:
    detail = "NameError: x (a.py:1, in the operation rollout)"
    driven = [Result(f"case_{name}_runs", "TRACE-4", "failed", detail) for name in ("a", "b", "c", "d")]
    checks = [
        Result("noise_has_unit_variance", "NOISE-2", "unsupported", "no record"),
        Result("rollouts_repeat_and_leave_global_state_alone", "ROLL-2", "failed", detail),
        Result("ode_steps_are_euler_steps", "KERN-2", "failed", "off"),
        Result("equal_keys_keep_the_lower_index", "PRUNE-2", "unsupported", "no operation prune"),
    ]
    found = not_judged(driven, checks)
    reason = "not judged: the case failed, see TRACE-4 (a, b, c and 1 more)"
    assert [(r.status, r.detail) for r in found] == [
        ("unsupported", reason),
        ("unsupported", reason),
        ("failed", "off"),
        ("unsupported", "no operation prune"),
    ]
    assert not_judged([], checks) == checks
    report = make_report("x", [*driven, *found], {})
    assert [(r.clause, len(names)) for r, names in report.faults()] == [("TRACE-4", 4), ("KERN-2", 1)]
    assert report.reasons() == {reason: ["NOISE-2", "ROLL-2"], "no operation prune": ["PRUNE-2"]}
    assert set(report.judged_musts()) == {"TRACE-4", "KERN-2"}


def test_the_command_prints_a_fault_once_and_the_reasons(somebody: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--impl", f"{somebody}:Crash"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("NameError") == 1
    assert f"somebody_else.py:{LINE}, in the operation rollout" in shown
    assert "failed TRACE-4 case_noise-sde_runs and" in shown
    assert "the case failed, see TRACE-4" in shown
    assert "TRACE-4, PLAN-7: no operation trained_subsets" in shown
    assert "57 not judged" in shown
    assert shown.count("case ") < 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("somebody_else:Needs", "a class without arguments, or an object (missing a required argument: 'width')"),
        ("somebody_else:Raises", "ZeroDivisionError: division by zero (somebody_else.py:"),
        ("no_python:Mine", "importable (SyntaxError"),
    ],
)
def test_a_class_that_cannot_be_made_is_one_line(
    somebody: str, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    assert main(["conformance", "--impl", name]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.count("\n") == 1
    assert message in found.err


def test_a_mistyped_operation_is_warned_of_and_nothing_judged_is_no_success(
    somebody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", "--impl", f"{somebody}:Typo", "--json"]) == 2
    found = capsys.readouterr()
    lines = found.err.splitlines()
    assert lines[0].endswith("Typo.transitions is no operation and is never called: did you mean 'transition'?")
    assert "no MUST clause of unnamed could be judged" in lines[1]
    assert {row["status"] for row in json.loads(found.out)["clauses"].values()} == {"unsupported"}


def test_names_that_nobody_calls() -> None:
    class Hooked(PerNodeImplementation):
        def score_trees(self) -> None:
            """Nearly a hook."""

        def trace_of(self) -> None:
            """A helper."""

    class Hidden:
        name, spec_version, capabilities = "hidden", "1.0", frozenset({"fuse"})

        def fuse(self) -> None:
            """Listed."""

        def prune(self) -> None:
            """Not listed."""

    assert suspicious_names(Hooked()) == [
        "Hooked.score_trees is no operation and is never called: did you mean 'score_tree'?"
    ]
    assert suspicious_names(Hidden()) == ["Hidden.prune is never called: its capabilities do not name it"]
    assert suspicious_names(ReferenceImplementation()) == []
    assert suspicious_names(PartialImplementation()) == []


def test_options_of_a_trace_are_named_with_their_record() -> None:
    names = {"arithmetic": "torch.float32", "storage": "float32", "denoiser": "float32"}
    with pytest.raises(InputError, match=r"^records\[3\].dtypes.arithmetic = 'torch.float32'"):
        decode_options(Dtypes, names, "records[3].dtypes")
    with pytest.raises(OptionError, match=r"^records\[3\].pruning\[1\].b = 0"):
        decode_rule({"rule": "extreme_b", "b": 0, "drop_split_edges": False}, "records[3].pruning[1]")


# ---- float64 throughout ----------------------------------------------------------------------------------------------


def test_a_rounding_of_float32_is_guessed() -> None:
    exact = torch.linspace(0.1, 1.0, 7, dtype=torch.float64)
    with pytest.raises(CheckFailedError, match=r"\(float32 rounding\?\)"):
        expect_close(exact.float().double(), exact, 1e-12, "numbers")
    assert rounding_hint(1e-3) == rounding_hint(1e-12) == ""


def test_advantages_are_float64_throughout() -> None:
    """A relative error of 1e-8, a third of float32's rounding, fails NORM-1 and NORM-3."""
    (record,) = record_case(Subject(ReferenceImplementation()), replace(all_cases()["tree"], training=False))
    rounded = {depth: level * (1 + 1e-8) for depth, level in record.levels["advantages"].items()}
    for check in (advantages_are_depth_wise_scores, the_std_has_the_declared_denominator):
        check([record])
        with pytest.raises(CheckFailedError, match="float32 rounding"):
            check([record.with_levels(advantages=rounded)])


def test_advantages_of_two_leaves_are_float64_too() -> None:
    class Rounded(ReferenceImplementation):
        def normalize(self, *arguments: object) -> tuple[torch.Tensor, ...]:
            return tuple(level * (1 + 1e-8) for level in super().normalize(*arguments))  # type: ignore[arg-type]

    advantages_ignore_origin_and_scale(Subject(ReferenceImplementation()))
    with pytest.raises(CheckFailedError, match="advantages of two leaves"):
        advantages_ignore_origin_and_scale(Subject(Rounded()))
