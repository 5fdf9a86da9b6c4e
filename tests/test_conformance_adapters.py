"""Foreign code behind the protocol: it passes for what it has, and planted faults fail the right clauses."""

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from branchgrpo.conformance.adapters.functions import FunctionsImplementation, StepFunctions
from branchgrpo.conformance.adapters.functions_noise import InjectedNoise
from branchgrpo.conformance.adapters.partial import PartialImplementation, require
from branchgrpo.conformance.cases import all_cases
from branchgrpo.conformance.checks.base import OPERATION_CHECKS, Subject, UnsupportedError
from branchgrpo.conformance.judge import judge, record_case
from branchgrpo.conformance.report import Report
from branchgrpo.conformance.runner import run_check, run_trace_checks, verdict
from branchgrpo.reference.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
SMALL = {"prompts": 1}
"""One prompt a case: enough for every formula, and for the noise of a tree's dozen edges of many elements."""


def example(name: str) -> ModuleType:
    """A file of examples/."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


FUNCTIONS, FLAT, TREE = (example(f"foreign_{name}") for name in ("functions", "flat", "tree"))


def judged(implementation: object) -> Report:
    return judge(Subject(implementation))


def statuses(report: Report, wanted: str) -> set[str]:
    return {clause for clause, status in report.statuses().items() if status == wanted}


# ---- what is right passes, what is missing is unsupported -----------------------------------------------------------


@pytest.mark.slow
def test_script_functions_pass_for_what_they_have() -> None:
    report = judged(FUNCTIONS.ScriptFunctions())
    assert statuses(report, "failed") == set()
    assert statuses(report, "passed") >= {"KERN-2", "KERN-3", "KERN-5", "KERN-6", "NOISE-1", "NOISE-2", "NOISE-4"}
    assert statuses(report, "passed") >= {"LOGP-1", "LOGP-2", "LOGP-3", "OBJ-1", "OBJ-2", "OBJ-7", "PRUNE-6", "ROLL-3"}
    assert statuses(report, "unsupported") >= {"FUSE-2", "NORM-1", "PRUNE-3", "SING-4", "KERN-4"}


@pytest.mark.slow
def test_a_flat_loop_passes_for_what_it_has() -> None:
    report = judged(FLAT.FlatLoop())
    assert statuses(report, "failed") == set()
    assert statuses(report, "passed") >= {"LOGP-3", "NORM-1", "NORM-3", "OBJ-1", "OBJ-3", "OBJ-4", "ROLL-2", "ERR-3"}
    assert statuses(report, "unsupported") >= {"FUSE-4", "PRUNE-3", "WIN-1", "SING-4"}
    unsupported = {r.check: r.detail for r in report.results if r.status == "unsupported"}
    assert unsupported["case_tree_runs"] == "only chains that part at step 0, with independent noise"


@pytest.mark.slow
def test_a_tree_class_passes_for_what_it_has() -> None:
    report = judged(TREE.TreeCode())
    assert statuses(report, "failed") == set()
    assert len(statuses(report, "passed")) >= 50
    assert statuses(report, "unsupported") >= {"SING-4", "GRAN-4", "FUSE-4", "PRUNE-5", "PLAN-7"}


def test_two_operations_are_judged_alone() -> None:
    class Two(PartialImplementation):
        name = "two"
        transition = TREE.TreeCode.transition
        log_probability = TREE.TreeCode.log_probability

    report = judged(Two())
    assert Two().capabilities == {"transition", "log_probability"}
    assert statuses(report, "failed") == set()
    assert statuses(report, "passed") == {"KERN-2", "KERN-3", "KERN-4", "KERN-6", "LOGP-1", "LOGP-2", "LOGP-5"}
    assert report.statuses()["TRACE-4"] == "unsupported"


def test_nothing_at_all_passes_nothing() -> None:
    report = judged(PartialImplementation())
    assert set(report.statuses().values()) == {"unsupported"}
    assert len(report.statuses()) > 60


def test_an_operation_that_says_it_cannot_is_not_a_refusal() -> None:
    """Checks of refusals expect an error; "I cannot" must not count as one."""

    class Shy(TREE.TreeCode):
        def objective(self, *arguments: object) -> object:
            raise UnsupportedError("no objective today")

    results = [run_check(check, Subject(Shy())) for check in OPERATION_CHECKS if check.clause in ("ERR-5", "OBJ-8")]
    assert [result.status for result in results] == ["unsupported", "unsupported"]


# ---- planted faults -------------------------------------------------------------------------------------------------


STEPS = [check for check in OPERATION_CHECKS if check.run.__module__.endswith("operation_steps")]


def failed_in(implementation: object, *cases: str) -> set[str]:
    """Clauses that fail on some small cases and on the formulas of steps, where the whole run would take long."""
    subject = Subject(implementation)
    records = [record for case in cases for record in record_case(subject, replace(all_cases()[case], **SMALL))]
    results = [*run_trace_checks(records), *(run_check(check, subject) for check in STEPS)]
    return {clause for clause, status in verdict(results).items() if status == "failed"}


def tree_with(**replaced: object) -> object:
    """The tree code with some of its functions replaced."""
    module = example("foreign_tree")
    for name, function in replaced.items():
        assert hasattr(module, name)
        setattr(module, name, function)
    return module.TreeCode()


def test_the_right_tree_code_fails_nothing() -> None:
    assert failed_in(tree_with(), "parent-top1", "noise-cps") == set()


def test_tree_fault_scaled_branch_noise() -> None:
    def scaled(shared: torch.Tensor, private: torch.Tensor, scale: float) -> torch.Tensor:
        return private * (1.0 if math.isinf(scale) else 1.0 + scale)

    assert failed_in(tree_with(mixed_noise=scaled), "noise-cps") >= {"NOISE-1", "NOISE-2"}


def test_tree_fault_std_of_the_population() -> None:
    right = TREE.z_scores

    def population(nodes: list[object], bessel: bool, eps: float, limit: float) -> torch.Tensor:
        return right(nodes, False, eps, limit)

    found = failed_in(tree_with(z_scores=population), "tree")
    assert "NORM-3" in found
    assert not found & {"KERN-3", "NOISE-1", "LOGP-1", "FUSE-2", "OBJ-1"}


def test_tree_fault_worse_child_kept() -> None:
    right = TREE.better_leaves

    def worse(root: object, scores: list[float]) -> object:
        return right(root, [-score for score in scores])

    found = failed_in(tree_with(better_leaves=worse), "parent-top1")
    assert "PRUNE-3" in found
    assert not found & {"KERN-3", "NOISE-1", "LOGP-1", "FUSE-2", "NORM-1", "OBJ-1"}


def script(**changed: object) -> FunctionsImplementation:
    functions = {"step": FUNCTIONS.flow_step, "branch_noise": FUNCTIONS.mix_noise, "loss": FUNCTIONS.grpo_loss}
    return FunctionsImplementation(StepFunctions(**{**functions, "score": "stored", **changed}))  # type: ignore[arg-type]


def test_function_fault_log_probability_before_rounding() -> None:
    """What most scripts do: the log-probability that comes with the sample (DIV-B2)."""
    assert failed_in(script(score="sampled"), "bf16", "tree") == {"LOGP-3", "OBJ-1"}


def test_function_fault_constants_dropped() -> None:
    def without(model_output, latents, eta, sigmas, index, prev_sample=None):
        sample, data, log_prob = FUNCTIONS.flow_step(model_output, latents, eta, sigmas, index, prev_sample)
        return sample, data, None if log_prob is None else log_prob + 0.5 * math.log(2 * math.pi)

    found = failed_in(script(step=without), "tree", "noise-sde")
    assert "LOGP-1" in found
    assert not found & {"KERN-3", "KERN-5", "NOISE-2", "OBJ-1"}


def test_function_fault_std_without_the_step_size() -> None:
    def wide(model_output, latents, eta, sigmas, index, prev_sample=None):
        step = float(sigmas[index] - sigmas[index + 1])
        sample, data, log_prob = FUNCTIONS.flow_step(model_output, latents, eta, sigmas, index, prev_sample)
        if prev_sample is None and eta > 0:
            sample = latents + (sample - latents) / math.sqrt(step)
        return sample, data, log_prob

    assert failed_in(script(step=wide), "tree") >= {"KERN-5"}


def test_flat_fault_ratio_upside_down() -> None:
    class Inverted(FLAT.FlatLoop):
        def loss(self, new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip: float) -> torch.Tensor:
            return FLAT.policy_loss(old, new, advantages, clip)

    found = failed_in(Inverted(), "flat")
    # The surrogate and its reduced value; a ratio of 1, on policy, is the same either way up (OBJ-1).
    assert found == {"OBJ-2", "OBJ-4"}


# ---- the pieces -----------------------------------------------------------------------------------------------------


def test_injected_noise_answers_draws_in_order() -> None:
    first, second = torch.full((2, 3), 1.0), torch.full((3,), 2.0)
    with InjectedNoise([first, second]):
        a = torch.randn_like(torch.zeros(2, 3, dtype=torch.float64))
        b = torch.randn(3, generator=torch.Generator())
    assert torch.equal(a, first.double())
    assert a.dtype is torch.float64
    assert torch.equal(b, second)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: (torch.randn(2), torch.randn(2)), "as many as the adapter expects"),
        (lambda: torch.randn(3), "draw 0: shape"),
        (lambda: torch.rand(2), "torch.randn or torch.randn_like"),
        (lambda: torch.zeros(2).normal_(), "torch.randn or torch.randn_like"),
        (lambda: None, "as many as the adapter expects"),
    ],
)
def test_injected_noise_lets_no_other_draw_through(draw, message: str) -> None:
    with pytest.raises(InputError, match=message), InjectedNoise([torch.zeros(2)]):
        draw()


def test_injected_noise_leaves_global_state_alone() -> None:
    before = torch.get_rng_state()
    with InjectedNoise([torch.zeros(2)]):
        torch.randn(2)
    assert torch.equal(before, torch.get_rng_state())


def test_require_names_the_reason() -> None:
    require(True, "never seen")
    with pytest.raises(UnsupportedError, match="no kernel cps"):
        require(False, "no kernel cps")


def test_the_documentation_names_what_exists() -> None:
    """Hooks, fields and operations that ADAPTERS.md lists are those of the code."""
    from branchgrpo.conformance.adapters.flat import FlatImplementation
    from branchgrpo.conformance.adapters.per_node import PerNodeImplementation
    from branchgrpo.reference.implementation import CAPABILITIES

    page = (ROOT / "conformance" / "ADAPTERS.md").read_text(encoding="utf-8")
    for operation in CAPABILITIES:
        assert f"| `{operation}` |" in page
    for hook in ("grow_tree", "stds", "make_node", "fuse_tree", "score_tree", "prune_tree"):
        assert f"`{hook}(" in page
        assert hasattr(PerNodeImplementation, hook)
    for hook in ("sample", "group_advantages", "score", "loss"):
        assert f"`{hook}(" in page
        assert hasattr(FlatImplementation, hook)
    for field in StepFunctions.__dataclass_fields__:
        assert f"`{field}`" in page
