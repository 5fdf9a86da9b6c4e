"""The audit: configuration, stages that catch faults, verdict, resumption, report."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import branchgrpo.conformance.audit.run as audit_run
from branchgrpo.conformance.adapters.optimized import OptimizedImplementation
from branchgrpo.conformance.adapters.partial import PartialImplementation
from branchgrpo.conformance.audit.concentration import effective_sample_size
from branchgrpo.conformance.audit.config import AuditConfig, config_from, read_config
from branchgrpo.conformance.audit.context import Context, reason
from branchgrpo.conformance.audit.costs import cost_table
from branchgrpo.conformance.audit.estimator import gradient_estimator
from branchgrpo.conformance.audit.kills import kill_matrix_data
from branchgrpo.conformance.audit.noise import branch_noise, sibling_covariance
from branchgrpo.conformance.audit.precision import drift_of_rounding, precision_drift
from branchgrpo.conformance.audit.pruning import pruning_parity
from branchgrpo.conformance.audit.report import plain
from branchgrpo.conformance.audit.run import STAGES, Stage, run_audit, run_stage
from branchgrpo.conformance.audit.run_plan import run_of_the_plan
from branchgrpo.conformance.audit.setting import BackboneError, make_setting
from branchgrpo.conformance.audit.store import context_key, read_stage, write_stage
from branchgrpo.conformance.audit.verdict import decide
from branchgrpo.conformance.checks.base import Subject, UnsupportedError
from branchgrpo.reference.errors import InputError, OptionError, PlanError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.plan import Plan

SMALL = AuditConfig(prompts=1, latent=(2, 4))


def context_of(implementation: object | None = None, config: AuditConfig = SMALL) -> Context:
    return Context(Subject(implementation or OptimizedImplementation()), make_setting(config), {})


def grades(data: dict) -> set[str]:
    return {found["grade"] for found in data["reasons"]}


# ---- configuration --------------------------------------------------------------------------------------------------


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_configuration_is_read_and_the_runs_own_tables_are_not(tmp_path: Path) -> None:
    text = '[model]\nanything = 1\n[audit]\npreset = "g2rpo"\nnoise = "fast"\nlog_prob = "sum"\nlatent = [2, 4]\n'
    setting = make_setting(read_config(write(tmp_path, text)))
    assert setting.method.name == "g2rpo"
    assert setting.method.log_prob == "sum"
    assert setting.config.elements == 8
    assert type(setting.noise()).__name__ == "PhiloxNoise"
    assert isinstance(setting.method.sampler, PlanFamily)
    assert isinstance(setting.plan(), Plan)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('presett = "g2rpo"', "audit.presett.*left out, or 'preset'"),
        ('storage = "float32"', "'storage_dtype'"),
        ('preset = "branchgpro"', "must be 'branchgrpo"),
        ('dtype = "flaot32"', "must be 'float32'"),
        ('storage_dtype = "int8"', "audit.storage_dtype"),
        ('noise = "keyd"', "must be 'keyed'"),
        ('backbone = "gausian"', "must be 'gaussian'"),
        ('backbone = "nowhere/at/all"', "the folder of a diffusers pipeline"),
        ('log_prob = "max"', "audit.log_prob"),
        ("seed = -1", "audit.seed = -1"),
        ("seed = true", "audit.seed = True"),
        ("prompts = 0", "audit.prompts = 0"),
        ("prompts = 1.5", "audit.prompts = 1.5"),
        ("latent = []", "latent_shape"),
        ("latent = [0]", "latent_shape"),
        ("latent = 4", "audit.latent = 4"),
    ],
)
def test_what_is_not_legal_is_refused_by_name(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises((OptionError, InputError), match=message):
        read_config(write(tmp_path, f"[audit]\n{line}\n"))


@pytest.mark.parametrize("text", ["", "[run]\n", "audit = 3\n", "[audit\n", "a = " + "[" * 5000])
def test_a_file_without_the_table_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"run\.toml"):
        read_config(write(tmp_path, text))


def test_a_missing_or_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an existing TOML file"):
        read_config(tmp_path / "none.toml")
    path = write(tmp_path, "")
    with path.open("r+b") as file:
        file.truncate(2**30)
    with pytest.raises(InputError, match="at most"):
        read_config(path)


def test_a_plan_of_ones_own(tmp_path: Path) -> None:
    plan = {
        "sigmas": [1.0, 0.5, 0.0],
        "kernels": [{"kind": "sde", "eta": 0.5}, {"kind": "ode", "eta": 0.0}],
        "branching": [3, 1],
        "spreads": ["inf", 0.0],
        "roots": 1,
        "output": "denoised",
        "trained_steps": None,
        "trained_fraction": 1.0,
    }
    path = tmp_path / "plan.json"
    for document in (plan, {"plan": plan}):
        path.write_text(json.dumps(document))
        assert make_setting(config_from({"plan": str(path)})).plan().branching == (3, 1)
    path.write_text(json.dumps({**plan, "branching": [3, 2]}))
    with pytest.raises(PlanError, match=r"branching\[1\]"):
        make_setting(config_from({"plan": str(path)}))
    with pytest.raises(InputError, match="an existing file"):
        make_setting(config_from({"plan": str(tmp_path / "none.json")}))


def test_a_folder_that_holds_no_pipeline_is_the_configurations_fault(tmp_path: Path) -> None:
    setting = make_setting(AuditConfig(backbone=str(tmp_path)))
    with pytest.raises(BackboneError, match=r"audit\.backbone"):
        setting.case(torch.device("cpu"), training=False)


# ---- stages: right code passes, faulty code is caught ---------------------------------------------------------------


class Scaled(OptimizedImplementation):
    """Branch noise that is too large where nodes split: states moved away from their means."""

    def rollout(self, plan, *arguments, **options):
        trace = super().rollout(plan, *arguments, **options)
        depth = plan.splits[0] + 1 if plan.splits else 1
        means = trace.means[depth - 1]
        states = list(trace.states)
        states[depth] = means + 4 * (states[depth] - means)
        return replace(trace, states=tuple(states))


class Unnormalised(OptimizedImplementation):
    """An objective divided by all edges, dropped ones included."""

    def objective(self, traces, model, condition, advantages, kept, *rest):
        value = super().objective(traces, model, condition, advantages, kept, *rest)
        return value * (sum(int(m.sum()) for m in kept[0]) / sum(m.numel() for m in kept[0]))


class Upside(OptimizedImplementation):
    """Advantages of the wrong sign."""

    def normalize(self, *arguments):
        return tuple(-level for level in super().normalize(*arguments))


class Wasteful(OptimizedImplementation):
    """Every rollout is made twice."""

    def rollout(self, *arguments, **options):
        super().rollout(*arguments, **options)
        return super().rollout(*arguments, **options)


def test_noise_stage() -> None:
    right = branch_noise(context_of())
    assert grades(right) == set()
    assert {row["clause"] for row in right["rows"]} == {"NOISE-2"}
    assert all(row["passed"] and 0 < row["detectable"] < 1 for row in right["rows"])
    assert set(right["plots"]) == {"split steps", "other steps"}
    for plot in right["plots"].values():
        assert plot["theory"] == sorted(plot["theory"])
        assert max(abs(a - b) for a, b in zip(plot["theory"], plot["found"], strict=True)) < 1.0
    wrong = branch_noise(context_of(Scaled()))
    assert grades(wrong) == {"reject"}
    assert any("variance" in found["text"] for found in wrong["reasons"])


def test_sibling_stage() -> None:
    right = sibling_covariance(context_of())
    assert grades(right) == set()
    assert [point["expected"] for point in right["points"]][-1] == 0.0
    assert all(abs(point["found"] - point["expected"]) <= point["error"] for point in right["points"])


class SharedNothing(OptimizedImplementation):
    """Siblings without a common part."""

    def rollout(self, plan, *arguments, **options):
        return super().rollout(replace(plan, spreads=(float("inf"),) * plan.steps), *arguments, **options)


def test_sibling_stage_catches_independent_siblings() -> None:
    assert grades(sibling_covariance(context_of(SharedNothing()))) == {"reject"}


@pytest.mark.slow
def test_estimator_stage() -> None:
    right = gradient_estimator(context_of())
    assert grades(right) == set()
    by_name = {row["component"]: row for row in right["rows"]}
    assert by_name["flat group, z-scores"]["angle"] < 1e-6
    assert by_name["late splits, z-scores"]["angle"] > by_name["late splits, mean over depths"]["angle"] > 1
    wrong = gradient_estimator(context_of(Upside()))
    assert grades(wrong) == {"reject"}


def test_pruning_stage() -> None:
    right = pruning_parity(context_of())
    assert grades(right) == set()
    assert [row["rule"] for row in right["rows"]] == ["Parent-Top1", "Extreme-2", "depth window, 2 of 6"]
    assert all(row["kept"] < row["edges"] and row["error"] < 1e-12 for row in right["rows"])
    assert grades(pruning_parity(context_of(Unnormalised()))) == {"reject"}


@pytest.mark.slow
def test_concentration_stage_warns_of_the_runs_own_weights() -> None:
    summed = AuditConfig(prompts=1, latent=(64, 64), log_prob="sum")
    data = effective_sample_size(context_of(config=summed))
    assert grades(data) == {"condition"}
    assert "in effect one" in data["reasons"][0]["text"]
    curves = data["curves"]
    assert curves["sum"]["measured"][-1] < 1.3 < 7 < curves["mean"]["measured"][-1] <= 8
    assert curves["sum"]["exact"] == sorted(curves["sum"]["exact"], reverse=True)


@pytest.mark.slow
def test_cost_stage() -> None:
    data = cost_table(context_of())
    assert data["measured"]["calls"] == data["measured"]["least"] == 203
    assert all(row["agrees"] for row in data["rows"])
    assert grades(data) == {"note"}
    assert grades(cost_table(context_of(Wasteful()))) == {"condition"}


def test_precision_stage() -> None:
    rows = precision_drift(context_of())["rows"]
    drift = {(row["dtype"], row["D"], row["reduction"]): row["median"] for row in rows}
    assert drift["float32", 65_536, "mean"] == 0.0
    assert drift["bfloat16", 65_536, "mean"] > 1e-4 > drift["float16", 65_536, "mean"]
    assert drift["bfloat16", 4096, "sum"] > 0.1
    # Rounding adds the variance of a uniform error: the log-probability falls on average.
    assert float(drift_of_rounding(0.05, 65_536, "bfloat16").mean()) < 0


@pytest.mark.slow
def test_run_stage_judges_the_runs_own_plan() -> None:
    config = AuditConfig(
        preset="dancegrpo-tf06", backbone="network", storage_dtype="bfloat16", prompts=1, latent=(4, 8)
    )
    data = run_of_the_plan(context_of(config=config))
    assert {row["status"] for row in data["results"]} == {"passed", "unsupported"}
    assert data["drift"] < data["clip"] / 10
    assert grades(data) == set()
    wrong = run_of_the_plan(context_of(Scaled(), config))
    assert "reject" in grades(wrong)


def test_siblings_that_cannot_be_told_apart_are_not_judged() -> None:
    """Twelve siblings of two elements: their coefficients in the update are not determined."""
    config = AuditConfig(preset="dancegrpo", backbone="network", prompts=1, latent=(2,))
    data = run_of_the_plan(context_of(config=config))
    assert data["drift"] is None
    assert grades(data) == {"condition"}
    assert {row["clause"] for row in data["results"] if row["status"] == "unsupported"} >= {"OBJ-1", "OBJ-2", "OBJ-4"}


def test_stages_without_their_operations_are_unsupported_not_passed() -> None:
    context = context_of(PartialImplementation())
    data = {stage.name: run_stage(stage, context) for stage in STAGES if stage.name not in ("clauses", "mutants")}
    assert all("unsupported" in found for name, found in data.items() if name not in ("precision", "costs"))
    assert decide(data)["decision"] == "adopt with conditions"


def test_an_implementation_that_breaks_is_rejected() -> None:
    def broken(context: Context) -> dict:
        raise ZeroDivisionError("no")

    def unable(context: Context) -> dict:
        raise UnsupportedError("cannot")

    found = run_stage(Stage("x", "the stage", broken), context_of())
    assert found["reasons"][0]["text"] == "the stage: ZeroDivisionError: no"
    assert grades(found) == {"reject"}
    assert run_stage(Stage("x", "the stage", unable), context_of())["unsupported"] == "cannot"


def test_kill_matrix_is_stored_or_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mutants.json"
    monkeypatch.setattr("branchgrpo.conformance.audit.kills.STORED", path)
    assert "--mutants" in kill_matrix_data(context_of())["unsupported"]
    row = {"clause": "KERN-3", "published": None, "killed_by": ["a"], "killed_by_own_clause": True}
    checks = {"a": {"clause": "KERN-3", "kills": ["m"]}, "b": {"clause": "KERN-4", "kills": []}}
    path.write_text(json.dumps({"mutants": {"m": row, "n": {**row, "killed_by_own_clause": False}}, "checks": checks}))
    found = kill_matrix_data(context_of())
    assert (found["living"], found["idle"]) == (["n"], ["b"])
    assert grades(found) == {"condition"}


# ---- verdict --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "decision"),
    [
        ([], "adopt"),
        (["note"], "adopt"),
        (["note", "condition"], "adopt with conditions"),
        (["condition", "reject", "note"], "reject"),
    ],
)
def test_verdict(given: list, decision: str) -> None:
    found = decide({"a": {"reasons": [reason(grade, grade) for grade in given]}})
    assert found["decision"] == decision
    order = [r["grade"] for r in found["reasons"]]
    assert order == sorted(given, key=("reject", "condition", "note").index)


def test_what_was_not_measured_is_a_condition_but_for_the_judges_own_matrix() -> None:
    assert decide({"noise": {"unsupported": "x", "reasons": []}})["decision"] == "adopt with conditions"
    assert decide({"mutants": {"unsupported": "x", "reasons": []}})["decision"] == "adopt"


# ---- storing and going on -------------------------------------------------------------------------------------------


def test_stored_stages_are_read_only_whole_and_under_their_key(tmp_path: Path) -> None:
    data = {"value": [1.5, None], "reasons": []}
    assert write_stage(tmp_path, "x", "key", data) == data
    assert read_stage(tmp_path, "x", "key") == data
    assert read_stage(tmp_path, "x", "other") is None
    assert read_stage(tmp_path, "y", "key") is None
    path = tmp_path / "x.json"
    text = path.read_text()
    for spoiled in (text[:-5], text.replace("1.5", "2.5"), "[]", "null", "", "[" * 100_000):
        path.write_text(spoiled)
        assert read_stage(tmp_path, "x", "key") is None


def test_the_key_follows_what_a_result_depends_on(tmp_path: Path) -> None:
    base = context_key("optimized", context_of())
    assert base == context_key("optimized", context_of())
    others = [
        context_key("reference", context_of()),
        context_key("optimized", context_of(config=replace(SMALL, seed=1))),
        context_key("optimized", context_of(config=replace(SMALL, noise="fast"))),
        context_key("optimized", replace(context_of(), expected={"KERN-3": "known"})),
    ]
    assert len({base, *others}) == 5


def test_an_interrupted_audit_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    stop = [True]

    def stage(name: str) -> Stage:
        def run(context: Context) -> dict:
            ran.append(name)
            if name == "third" and stop[0]:
                raise KeyboardInterrupt
            return {"reasons": []}

        return Stage(name, name, run)

    monkeypatch.setattr(audit_run, "STAGES", tuple(stage(name) for name in ("first", "second", "third")))
    context = context_of()
    with pytest.raises(KeyboardInterrupt):
        audit_run.run_stages(tmp_path, "optimized", context, lambda *_: None)
    stop[0] = False
    seen: list[tuple[int, bool]] = []
    audit_run.run_stages(tmp_path, "optimized", context, lambda number, _, stored: seen.append((number, stored)))
    assert ran == ["first", "second", "third", "third"]
    assert seen == [(0, True), (1, True), (2, False)]


# ---- report ---------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Ids, links and what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.anchors: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.anchors += [found["href"][1:]] if tag == "a" and found.get("href", "").startswith("#") else []
        self.loads += [found[key] for key in ("src",) if key in found]
        self.loads += [found["href"]] if tag == "link" else []
        assert tag != "script"


class TwoOperations(PartialImplementation):
    """Enough for a clause table, little else."""

    name = "two & <operations>"

    def log_probability(self, child, mean, std, reduction):
        return OptimizedImplementation().log_probability(child, mean, std, reduction)

    def branch_noise(self, shared, private, spread):
        return OptimizedImplementation().branch_noise(shared, private, spread)


def test_a_report_of_little_is_written_whole(tmp_path: Path) -> None:
    document = run_audit(tmp_path, "two", context_of(TwoOperations()))
    assert document["verdict"]["decision"] == "adopt with conditions"
    stored = json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
    assert stored == document
    assert stored["schema"] == "branchgrpo-audit"
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "two &amp; &lt;operations&gt;" in text
    page = Page()
    page.feed(text)
    assert set(page.anchors) <= set(page.ids)
    assert page.loads == []
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org|purl\.org|creativecommons\.org)", text)
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert int(suite.attrib["tests"]) == len(suite)
    assert int(suite.attrib["failures"]) == 0
    assert {"spec.LOGP-1", "spec.NOISE-2"} <= {case.attrib["classname"] for case in suite}


def test_clause_texts_are_readable_without_tex() -> None:
    assert plain(r"With $\lambda \ge 1$, `start` and $\mathrm{std}_i$") == "With λ ≥ 1, start and std_i"
    assert plain(r"$\lbrace 1 \rbrace$") == "{ 1 }"
