"""Clauses of spec/trace.md."""

import json
import math
import pickle
import re
from dataclasses import replace

import pytest
import torch
from helpers_spec import CONDITION, SDE, Network, f64, load_examples, small_plan
from safetensors.torch import load_file, save_file

from branchgrpo.conformance.adapters.optimized import OptimizedImplementation
from branchgrpo.conformance.adapters.reference import ReferenceImplementation
from branchgrpo.conformance.clauses import ROOT, clause
from branchgrpo.conformance.record import Dtypes, Record, RewardInfo
from branchgrpo.conformance.record_io import KEYS, SPEC_VERSION, TOP, json_path, read_trace, write_trace
from branchgrpo.conformance.rows import structure_rows, to_rows
from branchgrpo.reference.errors import BranchGRPOError, InputError
from branchgrpo.reference.implementation import CAPABILITIES, Implementation, Trace
from branchgrpo.reference.kernels import plan_stds
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import DepthWindow, ExtremeB, Fusion, Normalization, Objective, ParentTop1
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Prompt
from branchgrpo.reference.types import LeafOutput, Reduction

ROWS = load_examples("trace")["rows"]
PAGE = (ROOT / "spec/trace.md").read_text(encoding="utf-8")
PROMPTS = (Prompt(7, "a cat"), Prompt(9, "a dog"))
LATENT = (2, 3)


def plan_of_the_example():
    plan = small_plan((0,), steps=len(ROWS["branching"]), roots=ROWS["roots"], spread=math.inf)
    return replace(plan, branching=tuple(ROWS["branching"]))


def rolled(plan=None, storage=torch.float64):
    condition = CONDITION.gather(torch.tensor([0, 0]))
    return ReferenceImplementation().rollout(
        plan or plan_of_the_example(),
        Network(),
        PROMPTS,
        condition,
        KeyedNoise(3),
        latent_shape=LATENT,
        dtype=torch.float32 if storage is torch.bfloat16 else torch.float64,
        storage_dtype=storage,
        reduction=Reduction.MEAN,
        iteration=5,
    )


def record(trace: Trace, **changes):
    levels = {
        "states": dict(enumerate(trace.states)),
        "means": dict(enumerate(trace.means, start=1)),
        "log_probs": {d: level for d, level in enumerate(trace.log_probs, start=1) if level is not None},
    }
    full = Record(
        plan=trace.plan,
        iteration=5,
        prompts=trace.prompts,
        reduction=Reduction.MEAN,
        dtypes=Dtypes("float64", "float64", "float32"),
        reward_models=(RewardInfo("toy", "1", 1.0),),
        fusion=Fusion(),
        normalization=Normalization(),
        pruning=(ParentTop1(), ExtremeB(1), DepthWindow(1, 1, 1)),
        objective=Objective(),
        stds=trace.stds,
        levels=levels,
        rewards=f64([[[0.1], [0.2], [0.3], [0.4]], [[0.5], [0.6], [0.7], [0.8]]]),
        seed=3,
    )
    return replace(full, **changes)


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "run.safetensors"
    write_trace(path, [record(rolled())], "toy", "0.1")
    return path


def edit(path, change):
    document = json.loads(json_path(path).read_text())
    change(document)
    json_path(path).write_text(json.dumps(document))


@clause("TRACE-1", "TRACE-3")
@pytest.mark.parametrize("storage", [torch.float64, torch.bfloat16])
def test_a_trace_holds_what_the_rollout_used(storage):
    plan = replace(plan_of_the_example(), kernels=(SDE, SDE))
    trace = rolled(plan, storage)
    assert (trace.plan, trace.prompts) == (plan, PROMPTS)
    assert {state.dtype for state in trace.states} == {storage}
    assert trace.stds.tolist() == list(plan_stds(plan))
    for state, mean, log_prob, std in zip(trace.states[1:], trace.means, trace.log_probs, trace.stds, strict=True):
        assert log_prob is not None
        assert log_prob.dtype == torch.float64
        assert mean.shape == state.shape
        z = (state.double() - mean.double()) / std
        exact = (-0.5 * z * z - torch.log(std) - 0.5 * math.log(2 * math.pi)).flatten(2).mean(dim=2)
        torch.testing.assert_close(log_prob, exact, rtol=1e-13, atol=1e-13)


@clause("TRACE-3", "LOGP-4")
def test_a_level_of_a_deterministic_step_has_no_log_probabilities():
    trace = rolled(replace(plan_of_the_example(), output=LeafOutput.DENOISED))
    assert [level is None for level in trace.log_probs] == [False, True]


@clause("TRACE-2", "TRACE-7")
def test_the_example_rows():
    plan = plan_of_the_example()
    found = {name.removeprefix("node."): rows.tolist() for name, rows in structure_rows(plan).items()}
    assert found == {name: ROWS[name] for name in ("depth", "root", "index", "parent")}
    arrays = to_rows(record(rolled(plan)))
    for row, parent in enumerate(ROWS["parent"]):
        if parent >= 0:
            (k,) = {plan.branching[ROWS["depth"][parent]]}
            assert ROWS["index"][row] // k == ROWS["index"][parent]
            assert ROWS["root"][row] == ROWS["root"][parent]
    assert arrays["node.state"].shape == (2, len(ROWS["depth"]), *LATENT)


@clause("TRACE-2")
def test_levels_hold_roots_outermost():
    trace = rolled()
    for prompt in range(2):
        for root in range(2):
            alone = rolled(replace(plan_of_the_example(), roots=root + 1))
            for depth, size in enumerate(trace.plan.level_sizes):
                mine = trace.states[depth][prompt, root * size : (root + 1) * size]
                assert torch.equal(mine, alone.states[depth][prompt, root * size :])


@clause("TRACE-4")
@pytest.mark.parametrize("kind", [ReferenceImplementation, OptimizedImplementation])
def test_an_implementation_names_itself_and_its_operations(kind):
    (clause_text,) = re.findall(r"\*\*TRACE-4\*\*.*", PAGE)
    assert set(re.findall(r"`(\w+)`", clause_text)) == CAPABILITIES
    implementation = kind()
    assert implementation.capabilities <= CAPABILITIES
    assert implementation.name
    (version,) = re.findall(r"^Version: (\S+)$", (ROOT / "spec/README.md").read_text(), re.MULTILINE)
    assert implementation.spec_version == version == SPEC_VERSION
    for name in CAPABILITIES:
        assert callable(getattr(Implementation, name))
        assert callable(getattr(implementation, name))


@clause("TRACE-5", "TRACE-7", "TRACE-8")
@pytest.mark.parametrize("storage", [torch.float64, torch.bfloat16])
def test_a_trace_survives_its_files(tmp_path, storage):
    path = tmp_path / "run.safetensors"
    trace = rolled(storage=storage)
    before = record(trace)
    write_trace(path, [before, before], "toy", "0.1")
    _, records = read_trace(path)[-2:]
    for after in records:
        for name in ("plan", "prompts", "iteration", "seed", "reduction", "dtypes", "fusion", "pruning", "objective"):
            assert getattr(after, name) == getattr(before, name)
        assert after.levels.keys() == before.levels.keys()
        for name, levels in before.levels.items():
            for depth, level in levels.items():
                assert after.levels[name][depth].dtype == level.dtype
                assert torch.equal(after.levels[name][depth], level)
        assert torch.equal(after.rewards, before.rewards)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.json", "run.safetensors"]
    header = path.read_bytes()
    assert b"__metadata__" not in header[: 8 + int.from_bytes(header[:8], "little")]


TABLE = re.compile(r"^\| `((?:node|edge|leaf)\.\w+)` \| (\w+) \| ([\w, ]+) \| (yes|no) \|", re.MULTILINE)
DTYPES = {"int64": {torch.int64}, "bool": {torch.bool}, "float64": {torch.float64}, "float": {torch.float64}}


@clause("TRACE-7")
def test_the_pages_table_is_what_is_written_and_required(written):
    rows = TABLE.findall(PAGE)
    assert len(rows) > 15
    arrays = load_file(written)
    for name, dtype, shape, required in rows:
        if f"0/{name}" not in arrays:
            assert required == "no"
            continue
        array = arrays[f"0/{name}"]
        assert array.dtype in DTYPES[dtype]
        sizes = {"prompts": 2, "rows": 10, "leaves": 4, "models": 1}
        wanted = shape.replace(" ", "").split(",")
        expected = [n for part in wanted for n in (LATENT if part == "latent" else (sizes[part],))]
        assert list(array.shape) == expected, name
        if required == "yes":
            rest = {key: value for key, value in arrays.items() if key != f"0/{name}"}
            save_file(rest, written)
            with pytest.raises(InputError, match=name.replace(".", r"\.")):
                read_trace(written)
            save_file(arrays, written)
    assert {f"0/{name}" for name, *_ in rows} >= set(arrays)


@clause("TRACE-7")
def test_the_pages_keys_are_those_of_the_json(written):
    document = json.loads(json_path(written).read_text())
    named = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| [^|]+\|$", PAGE, re.MULTILINE)
    keys = {key for cell in named for key in re.findall(r"`(\w+)`", cell)}
    assert keys == TOP | KEYS == set(document) | set(document["records"][0])


@clause("TRACE-6", "TRACE-8")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.update(version=2), r"version"),
        (lambda d: d.update(schema="other"), r"schema"),
        (lambda d: d.pop("spec_version"), r"spec_version"),
        (lambda d: d.update(colour="blue"), r"colour"),
        (lambda d: d.update(records=[]), r"records"),
        (lambda d: d["records"][0].pop("plan"), r"plan"),
        (lambda d: d["records"][0].update(reduction="max"), r"reduction"),
        (lambda d: d["records"][0]["plan"].update(roots=0), r"roots"),
        (lambda d: d["records"][0]["plan"].update(sigmas=[1.0, 0.5, 0.1]), r"sigmas"),
    ],
)
def test_another_schema_version_or_key_is_refused(written, change, match):
    read_trace(written)
    edit(written, change)
    with pytest.raises(BranchGRPOError, match=match):
        read_trace(written)


@clause("TRACE-6")
def test_the_json_has_no_nan_and_no_infinity(written):
    text = json_path(written).read_text()
    json.loads(text, parse_constant=lambda constant: pytest.fail(constant))
    assert json.loads(text)["records"][0]["plan"]["spreads"] == ["inf", "inf"]
    for constant in ("NaN", "Infinity", "-Infinity"):
        json_path(written).write_text(text.replace('"iteration": 5', f'"iteration": {constant}'))
        with pytest.raises(InputError, match=constant):
            read_trace(written)


def with_array(name, value):
    def change(arrays):
        arrays[name] = value(arrays[name]) if callable(value) else value

    return change


def set_nan(array):
    array = array.clone()
    array.flatten()[-1] = math.nan
    return array


@clause("TRACE-7")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (with_array("0/node.colour", torch.zeros(1)), r"node.colour"),
        (with_array("1/node.depth", torch.zeros(10, dtype=torch.int64)), r"1/node.depth"),
        (with_array("0/edge.log_prob", lambda a: a.float()), r"edge.log_prob"),
        (with_array("0/edge.log_prob", lambda a: a[:, :-1].contiguous()), r"edge.log_prob"),
        (with_array("0/node.state", set_nan), r"node.state"),
        (with_array("0/leaf.reward", set_nan), r"leaf.reward"),
        (with_array("0/node.parent", lambda a: a.flip(0).contiguous()), r"node.parent"),
        (with_array("0/edge.sigma", lambda a: a * 0.5), r"edge.sigma"),
        (with_array("0/edge.is_sde", lambda a: ~a), r"edge.is_sde"),
    ],
)
def test_arrays_that_contradict_page_or_plan_are_refused_by_name(written, change, match):
    arrays = load_file(written)
    change(arrays)
    save_file(arrays, written)
    with pytest.raises(InputError, match=match):
        read_trace(written)


class Bomb:
    """Unpickling it would raise an AssertionError that no reader turns into an InputError."""

    def __reduce__(self):
        return exec, ("raise AssertionError('a trace was unpickled')",)


@clause("TRACE-5")
@pytest.mark.parametrize("content", ["pickle", "truncated", "empty", "long header"])
def test_what_is_no_safetensors_file_is_refused_and_nothing_runs(written, content):
    whole = written.read_bytes()
    bad = {
        "pickle": pickle.dumps(Bomb()),
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
        "long header": (2**40).to_bytes(8, "little") + whole[8:],
    }
    written.write_bytes(bad[content])
    with pytest.raises(InputError):
        read_trace(written)


@clause("TRACE-5")
def test_both_files_are_needed(written):
    assert isinstance(plan_of_the_example(), Plan)
    json_path(written).unlink()
    with pytest.raises(InputError, match=r"run\.json"):
        read_trace(written)
