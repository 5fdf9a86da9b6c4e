"""The test vectors: what they hold, that they stay, that they are read strictly, and what they tell apart."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from branchgrpo.conformance.clauses import ROOT, clause, load_clauses
from branchgrpo.conformance.mutants.base import MUTANTS, Mutant
from branchgrpo.conformance.mutants.plain import PlainImplementation
from branchgrpo.conformance.vectors.cases import DRIVEN, OPERATIONS, PARTS, TOLERANCES, Case
from branchgrpo.conformance.vectors.compare import difference
from branchgrpo.conformance.vectors.files import FOLDER, merged, read_vectors, write_vectors
from branchgrpo.conformance.vectors.ids import decode_ids, extended, head
from branchgrpo.conformance.vectors.kills import first_kills
from branchgrpo.conformance.vectors.parts import ReferenceParts
from branchgrpo.conformance.vectors.verify import judged, main
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.implementation import CAPABILITIES

PUBLISHED = (557, "f9d1bea7ff907052879f3b38aacf3aae5b39b85d0c47888942e93d92c3befde6")
"""How many ids are published, and the digest over them: it only changes if one of them is changed, moved or removed.
New ids come after them; a release moves this on."""
SMALL = ("schedule", "transition")


@pytest.fixture(scope="module")
def vectors():
    return read_vectors()


@pytest.fixture(scope="module")
def few(vectors, tmp_path_factory):
    """Two operations, written as all are."""
    folder = tmp_path_factory.mktemp("few") / "v1"
    write_vectors(folder, [case for case in vectors if case.operation in SMALL])
    return folder


@pytest.fixture
def small(few, tmp_path):
    """A copy of them that a test may spoil."""
    return Path(shutil.copytree(few, tmp_path / "v1"))


@pytest.fixture
def copy(tmp_path):
    """A copy of all vectors that a test may spoil."""
    return Path(shutil.copytree(FOLDER, tmp_path / "v1"))


def fresh(code, *arguments):
    """What a piece of code prints as JSON in an interpreter of its own, without the type checks of the test run."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def edit(path, change):
    document = read_json(path)
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def reindex(folder):
    """Make the index fit files that a test has changed, so that what lies behind the hashes is what is judged."""

    def refresh(index):
        for entry in index["files"]:
            content = (folder / entry["name"]).read_bytes()
            entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    edit(folder / "index.json", refresh)


def of(vectors, operation):
    return [case for case in vectors if case.operation == operation]


# What they hold


def test_there_are_enough_of_every_operation_and_a_fifth_are_bad_input(vectors):
    counts = Counter(case.operation for case in vectors)
    assert len(vectors) >= 300
    assert set(counts) == set(OPERATIONS)
    assert min(counts.values()) >= 10, counts
    assert sum(case.error is not None for case in vectors) >= len(vectors) / 5


def test_every_operation_of_the_protocol_has_vectors():
    assert set(DRIVEN) == CAPABILITIES
    assert set(PARTS).isdisjoint(DRIVEN)


def test_they_are_small_and_have_modes_that_everybody_can_read():
    files = list(FOLDER.iterdir())
    assert sum(path.stat().st_size for path in files) < 5e6
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files)


def test_every_clause_that_they_name_is_stated(vectors):
    known = {c.id for c in load_clauses()[0]}
    assert {name for case in vectors for name in case.clauses} <= known


def test_every_tolerance_in_use_has_a_bound_and_a_reason(vectors):
    for operation in OPERATIONS:
        stated = read_json(FOLDER / f"{operation}.json")["tolerances"]
        assert set(stated) == {case.tolerance for case in of(vectors, operation) if case.error is None}
        assert all(len(entry["reason"]) > 40 and entry["bound"] >= 0 for entry in stated.values())
    used = {case.tolerance for case in vectors if case.error is None}
    assert used == set(TOLERANCES), "a tolerance that no vector uses"


def test_json_has_no_nan_and_arrays_only_where_they_are_to_be_refused(vectors):
    def refuse(name):
        raise AssertionError(name)

    for path in FOLDER.glob("*.json"):
        json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    loose = {c.id for c in vectors if not all(np.isfinite(a).all() for a in [*c.inputs.values(), *c.outputs.values()])}
    assert loose
    assert all(case.error for case in vectors if case.id in loose)


def test_safetensors_have_no_metadata():
    for path in FOLDER.glob("*.safetensors"):
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert "__metadata__" not in header


def test_inputs_of_a_step_are_exact_in_every_dtype_that_they_are_used_in(vectors):
    for case in of(vectors, "transition"):
        for array in case.inputs.values():
            assert np.array_equal(array * 32, np.round(array * 32))
            assert np.abs(array * 32).max() < 2**8


# That they stay


def test_published_ids_keep_their_content_and_their_place():
    ids = decode_ids(read_json(FOLDER / "ids.json"))
    count, digest = PUBLISHED
    assert len(ids) >= count
    assert head(ids[:count]) == digest


AGAIN = """
import json, sys
from pathlib import Path
from branchgrpo.conformance.vectors.files import merged, read_vectors, write_vectors
from branchgrpo.conformance.vectors.generate import generate
from branchgrpo.reference.errors import InputError
published, made, changed, inexact = read_vectors(), {case.id: case for case in generate()}, [], []
for case in published:
    try:
        changed += [] if merged(case, made[case.id]).digest() == case.digest() else [case.id]
    except (InputError, KeyError) as error:
        changed.append(str(error))
    inexact += [] if made[case.id].digest() == case.digest() else [case.id]
for folder in sys.argv[1:]:
    write_vectors(Path(folder), list(made.values()))
print(json.dumps({"changed": changed, "inexact": inexact, "ids": list(made)}))
"""


def test_the_reference_makes_them_again(vectors, tmp_path):
    """Questions and exact answers bit by bit; the others to their tolerance, as libraries round exp, log and sums."""
    folders = [tmp_path / "one", tmp_path / "two"]
    found = fresh(AGAIN, *map(str, folders))
    assert found["changed"] == []
    assert set(found["ids"]) == {case.id for case in vectors}
    exact = {case.id for case in vectors if case.error is not None or case.tolerance == "exact"}
    assert exact.isdisjoint(found["inexact"])
    one, two = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert one == two
    assert one["schema.json"] == (FOLDER / "schema.json").read_bytes()


def test_writing_over_published_vectors_changes_no_byte(vectors, small):
    before = {path.name: path.read_bytes() for path in small.iterdir()}
    last_bits = [
        replace(case, outputs={name: array * (1 + 2.0**-50) for name, array in case.outputs.items()})
        for case in vectors
        if case.operation in SMALL
    ]
    write_vectors(small, last_bits)
    assert {path.name: path.read_bytes() for path in small.iterdir()} == before


@pytest.mark.parametrize("what", ["argument", "input", "output", "expected", "tolerance", "error"])
def test_a_published_vector_cannot_change(vectors, what):
    case = next(c for c in vectors if c.id == ("schedule-4-shift-3" if what == "expected" else "transition-sde-2"))
    changed = {
        "argument": lambda: replace(case, arguments={**case.arguments, "step": 1}),
        "input": lambda: replace(case, inputs={**case.inputs, "x": case.inputs["x"] + 1}),
        "output": lambda: replace(case, outputs={**case.outputs, "mean": case.outputs["mean"] * (1 + 1e-9)}),
        "expected": lambda: replace(case, expected={"sigmas": [1.0, 0.9, 0.75, 0.25, 0.0]}),
        "tolerance": lambda: replace(case, tolerance="cancelled"),
        "error": lambda: replace(case, error="x", expected={}, outputs={}),
    }[what]()
    with pytest.raises(InputError, match="as published"):
        merged(case, changed)


def test_a_withdrawn_vector_leaves_its_id_behind(vectors):
    vectors = vectors[:20]
    ids = extended([], vectors)
    assert [row.id for row in ids] == [case.id for case in vectors]
    retired = extended(ids, vectors[1:])
    assert [row.retired for row in retired] == [True] + [False] * (len(ids) - 1)
    with pytest.raises(InputError, match="retired"):
        extended(retired, vectors)
    new = replace(vectors[0], id="schedule-new")
    assert [row.id for row in extended(ids, [*vectors, new])] == [*(row.id for row in ids), "schedule-new"]
    assert head(ids) == head(extended(ids, [*vectors, new])[: len(ids)]) != head(ids[1:])


# That they are read strictly


def test_a_file_that_is_not_what_the_index_says_is_refused(small):
    path = small / "schedule.json"
    path.write_text(path.read_text(encoding="utf-8").replace("0.9", "0.8", 1), encoding="utf-8")
    with pytest.raises(InputError, match="sha256 of schedule"):
        read_vectors(small)


def rename(index):
    index["files"][0]["name"] = "../" + index["files"][0]["name"]


INDEX_FAULTS = {
    "another schema": (lambda d: d.update(schema="branchgrpo-trace"), "index.schema"),
    "another version": (lambda d: d.update(version=2), "index.version"),
    "an unknown key": (lambda d: d.update(extra=1), "index.extra"),
    "a missing key": (lambda d: d.pop("spec_version"), "index.spec_version"),
    "a way out of the folder": (rename, "plain file name"),
    "an absolute path": (lambda d: d["files"][0].update(name="/etc/passwd"), "plain file name"),
    "a file that is not there": (lambda d: d["files"][0].update(name="nowhere.json"), "a file of the folder"),
    "a size that is too large": (lambda d: d["files"][0].update(bytes=2**40), "at most"),
    "no list of files": (lambda d: d.update(files=3), "JSON array"),
    "another number of vectors": (lambda d: d.update(vectors=3), "index.vectors"),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_an_index_with_a_fault_is_refused(small, fault):
    change, message = INDEX_FAULTS[fault]
    edit(small / "index.json", change)
    with pytest.raises(InputError, match=message):
        read_vectors(small)


def test_a_link_is_not_followed(small, tmp_path):
    outside = tmp_path / "outside.json"
    (small / "schedule.json").rename(outside)
    (small / "schedule.json").symlink_to(outside)
    with pytest.raises(InputError, match="a file of the folder"):
        read_vectors(small)


CASE_FAULTS = {
    "an unknown key": (lambda d: d["cases"][0].update(extra=1), "cases\\[0\\].extra"),
    "a missing key": (lambda d: d["cases"][0].pop("clauses"), "cases\\[0\\].clauses"),
    "another argument": (lambda d: d["cases"][0]["arguments"].update(step=3), "as listed in ids.json"),
    "an id that nobody published": (lambda d: d["cases"][0].update(id="transition-unheard-of"), "transition"),
    "an id that is a path": (lambda d: d["cases"][0].update(id="../transition"), "lower-case"),
    "two of one id": (lambda d: d["cases"].append(d["cases"][0]), "once"),
    "a vector less": (lambda d: d["cases"].pop(), "transition"),
    "an unknown tolerance": (lambda d: d["cases"][0].update(tolerance="loose"), "tolerance"),
    "a looser bound": (lambda d: d["tolerances"]["float64"].update(bound=1.0), "tolerances"),
    "another shape": (lambda d: d["cases"][0]["inputs"]["x"].update(shape=[4, 3]), "arrays of"),
    "another operation": (lambda d: d.update(operation="rollout"), "operation"),
    "arguments that are a list": (lambda d: d["cases"][0].update(arguments=[]), "JSON object"),
}


@pytest.mark.parametrize("fault", CASE_FAULTS)
def test_a_vector_with_a_fault_is_refused(small, fault):
    change, message = CASE_FAULTS[fault]
    edit(small / "transition.json", change)
    reindex(small)
    with pytest.raises(InputError, match=message):
        read_vectors(small)


@pytest.mark.parametrize("text", ["[" * 200000, '{"schema": NaN}', "{", "\ufeff\x00"])
def test_json_that_is_no_strict_json_is_refused(small, text):
    (small / "transition.json").write_text(text, encoding="utf-8")
    reindex(small)
    with pytest.raises(InputError, match=r"transition\.json"):
        read_vectors(small)


def spoiled_arrays(path, change):
    arrays = load_file(path)
    change(arrays)
    path.write_bytes(save(arrays))


ARRAY_FAULTS = {
    "a number": (lambda a: a.update({"transition-ode-0/in.x": a["transition-ode-0/in.x"] + 1}), "as listed"),
    "a missing array": (lambda a: a.pop("transition-ode-0/in.x"), "arrays of"),
    "an array of no vector": (lambda a: a.update({"transition-nobody/in.x": np.zeros(2)}), "transition-nobody"),
    "another name": (lambda a: a.update({"x": np.zeros(2)}), "ID/in.NAME"),
    "another dtype": (lambda a: a.update({"transition-ode-0/in.x": np.zeros((3, 4), np.float32)}), "64 bits"),
    "a NaN": (lambda a: a.update({"transition-ode-0/out.mean": np.full((3, 4), np.nan)}), "finite"),
}


@pytest.mark.parametrize("fault", ARRAY_FAULTS)
def test_arrays_with_a_fault_are_refused(small, fault):
    change, message = ARRAY_FAULTS[fault]
    spoiled_arrays(small / "transition.safetensors", change)
    reindex(small)
    with pytest.raises(InputError, match=message):
        read_vectors(small)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_pickle_in_place_of_arrays_is_not_loaded(small, tmp_path):
    import pickle

    (small / "transition.safetensors").write_bytes(pickle.dumps(Bomb(tmp_path / "fired")))
    reindex(small)
    with pytest.raises(InputError, match="safetensors"):
        read_vectors(small)
    assert not (tmp_path / "fired").exists()


@pytest.mark.parametrize("keep", [0, 7, 100, 20000])
def test_truncated_arrays_are_refused(small, keep):
    path = small / "transition.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    reindex(small)
    with pytest.raises(InputError, match="transition"):
        read_vectors(small)


# What they tell apart


VERIFY = """
import json
from branchgrpo.conformance.subject_loading import load_implementation
from branchgrpo.conformance.vectors.parts import ReferenceParts
from branchgrpo.conformance.vectors.verify import verify
subjects = [load_implementation(name) for name in ("reference", "optimized", "plain")]
print(json.dumps({s.name: [[r.check, r.status, r.detail] for r in verify(s)] for s in (*subjects, ReferenceParts())}))
"""


@clause("TRACE-4")
def test_implementations_of_ours_agree_and_what_they_lack_is_unsupported(vectors):
    found = fresh(VERIFY)
    assert len(found) == 4
    for name, results in found.items():
        assert not [row for row in results if row[1] == "failed"], name
        has = PARTS if name == ReferenceParts.name else DRIVEN
        wanted = {case.id: "passed" if case.operation in has else "unsupported" for case in vectors}
        assert {check: status for check, status, _ in results} == wanted, name


@clause("TRACE-4")
def test_a_missing_operation_is_unsupported_not_passed(vectors):
    partial = PlainImplementation()
    partial.capabilities = CAPABILITIES - {"fuse"}
    assert {judged(partial, case).status for case in of(vectors, "fuse")} == {"unsupported"}


def test_a_refusal_for_another_reason_does_not_count(vectors):
    class Grumpy(PlainImplementation):
        def fuse(self, trace, rewards, options):
            raise InputError("moon", "full", "new")

    bad = next(case for case in of(vectors, "fuse") if case.error)
    good = next(case for case in of(vectors, "fuse") if case.error is None)
    assert judged(Grumpy(), bad).status == judged(Grumpy(), good).status == "failed"
    assert "another reason" in judged(Grumpy(), bad).detail


def test_bad_input_that_is_accepted_is_a_failure(vectors):
    class Lenient(PlainImplementation):
        def prune(self, plan, keys, rules, iteration):
            return super().prune(plan, keys, (), iteration)

    bad = next(case for case in of(vectors, "prune") if case.error)
    assert "accepted" in judged(Lenient(), bad).detail


def case_of(**outputs):
    expected = {"n": 3, "x": 2.0, "who": "a", "on": True, "few": [1.0, 2.0]}
    return Case("compare-one", "plan", ("PLAN-1",), "", expected=expected, outputs={"y": np.array([1.0, -4.0])})


@pytest.mark.parametrize(
    "change",
    [
        {"n": 4},
        {"n": 3.0},
        {"n": True},
        {"x": 2.0 + 1e-11},
        {"x": float("nan")},
        {"who": "b"},
        {"on": 1},
        {"few": [1.0]},
        {"few": [1.0, 2.0 + 1e-11]},
        {"y": np.array([1.0 + 1e-11, -4.0])},
        {"y": np.array([1.0, np.nan])},
        {"y": np.array([1, -4])},
        {"y": np.array([[1.0, -4.0]])},
        {"z": 1},
    ],
)
def test_a_departure_is_seen(change):
    case = case_of()
    right = {**case.expected, **case.outputs}
    assert difference(case, right) is None
    assert difference(case, {**right, "x": 2.0 * (1 + 1e-13), "y": np.array([1.0 + 1e-13, -4.0])}) is None
    assert difference(case, {**right, **change}) is not None


def test_an_answer_that_lacks_a_part_is_seen():
    case = case_of()
    for name in (*case.expected, *case.outputs):
        rest = {k: v for k, v in {**case.expected, **case.outputs}.items() if k != name}
        assert difference(case, rest) is not None


def test_zero_is_exactly_zero():
    case = Case("zero", "normalize", ("NORM-4",), "", outputs={"a": np.zeros(3)})
    assert difference(case, {"a": np.zeros(3)}) is None
    assert difference(case, {"a": np.array([0.0, 1e-300, 0.0])}) is not None


def test_a_range_holds_both_its_ends():
    case = Case("range", "rollout", ("PLAN-4",), "", expected={"calls": {"least": 3, "most": 5}})
    assert [difference(case, {"calls": n}) is None for n in (2, 3, 5, 6)] == [False, True, True, False]


def test_a_few_mutants_die(vectors, monkeypatch):
    killers = {
        "drift_with_the_wrong_sign": "transition-sde-0",
        "population_for_bessel": "normalize-tree",
        "no_clip": "objective-clipped",
    }
    cases = [case for case in vectors if case.id in {*killers.values(), "splits-none"}]
    assert {name: result.check for name, result in first_kills(cases, list(killers)).items()} == killers
    assert first_kills(cases[:1], list(killers)) == dict.fromkeys(killers)
    assert first_kills(cases, []) == {}
    monkeypatch.setitem(MUTANTS, "only_a_file", Mutant("only_a_file", "TRACE-6"))
    with pytest.raises(InputError, match="mutant"):
        first_kills(cases, ["only_a_file"])


KILLS = """
import json
from branchgrpo.conformance.vectors.files import read_vectors
from branchgrpo.conformance.vectors.kills import first_kills
print(json.dumps({name: result and result.check for name, result in first_kills(read_vectors()).items()}))
"""


@pytest.mark.slow
def test_the_vectors_alone_kill_the_mutants():
    kills = fresh(KILLS)
    survivors = [name for name, vector in kills.items() if vector is None]
    assert len(kills) >= 40
    assert len(survivors) <= 0.2 * len(kills), survivors


def test_the_command_says_how_an_implementation_fares(small, monkeypatch, capsys):
    monkeypatch.setattr("branchgrpo.conformance.vectors.verify.FOLDER", small)
    assert main([]) == 0
    assert "19 passed, 0 failed, 31 unsupported" in capsys.readouterr().out
    assert main(["no.such.module:Thing"]) == 2
    assert main(["branchgrpo.conformance.mutants.rollout_faults:DriftWithTheWrongSign"]) == 1
    assert "KERN-3" in capsys.readouterr().out


# The reader without torch


def read_without_torch(*arguments):
    """Run the NumPy reader in an interpreter in which torch, safetensors and this project cannot be imported."""
    script = ROOT / "examples" / "check_vectors.py"
    lines = [
        "import runpy, sys",
        "sys.modules.update(dict.fromkeys(('torch', 'safetensors', 'branchgrpo', 'jaxtyping')))",
        f"sys.argv[:] = {[str(script), *arguments]!r}",
        f"sys.path.insert(0, {str(script.parent)!r})",
        f"runpy.run_path({str(script)!r}, run_name='__main__')",
    ]
    command = [sys.executable, "-c", "; ".join(lines)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_numpy_reader_agrees(vectors):
    done = read_without_torch()
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert {row[0] for row in rows} == set(OPERATIONS)
    assert sum(int(row[1]) + int(row[3]) for row in rows) == len(vectors)
    assert sum(int(row[3]) for row in rows) == sum(case.error is not None for case in vectors)


def test_the_numpy_reader_sees_a_wrong_number(copy):
    def flip(arrays):
        for name, array in arrays.items():
            if name.startswith("normalize-wide/out"):
                arrays[name] = -array

    spoiled_arrays(copy / "normalize.safetensors", flip)
    done = read_without_torch(str(copy))
    assert done.returncode == 1
    assert "not what the index says" in done.stderr
    reindex(copy)
    done = read_without_torch(str(copy))
    assert done.returncode == 1
    assert "normalize-wide" in done.stdout


def test_the_schema_fits_every_file_and_nothing_else():
    import jsonschema

    schema = read_json(FOLDER / "schema.json")
    jsonschema.Draft202012Validator.check_schema(schema)
    for path in FOLDER.glob("*.json"):
        name = {"index": "index", "ids": "ids"}.get(path.stem, f"operation_{path.stem}")
        if path.stem == "schema":
            continue
        one = jsonschema.Draft202012Validator({**schema, "oneOf": [{"$ref": f"#/$defs/{name}"}]})
        document = read_json(path)
        assert one.is_valid(document), path.name
        assert not one.is_valid({**document, "extra": 1})
    broken = read_json(FOLDER / "transition.json")
    broken["cases"][0]["arguments"]["steps"] = 4
    assert not jsonschema.Draft202012Validator(schema).is_valid(broken)
