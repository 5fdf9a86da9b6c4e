"""The vectors as files: written in one form, read strictly, bounded, and without executing anything."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from branchgrpo.conformance.clauses import ROOT
from branchgrpo.conformance.codec import check_keys, integer, items, text
from branchgrpo.conformance.record_io import SPEC_VERSION, check_header, read_json
from branchgrpo.conformance.vectors.cases import (
    INDEX_SCHEMA,
    OPERATIONS,
    SCHEMA,
    TOLERANCES,
    VERSION,
    Array,
    Case,
    describe,
)
from branchgrpo.conformance.vectors.compare import difference
from branchgrpo.conformance.vectors.ids import Id, decode_ids, extended
from branchgrpo.conformance.vectors.schema import schema
from branchgrpo.reference.errors import InputError

FOLDER = ROOT / "spec" / "vectors" / "v1"
LIMIT = 16 * 2**20
"""Bytes of one file that are read; all of version 1 are a few megabytes."""
NAME = re.compile(r"[a-z0-9_]+\.(json|safetensors)")
IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9_-]{2,79}")
ARRAY = re.compile(r"(?P<id>[a-z0-9_-]+)/(?P<side>in|out)\.(?P<name>[a-z0-9_.]+)")
CASE = {"id", "clauses", "comment", "arguments", "inputs"}
IDS_COMMENT = "Append-only: an id keeps its content for ever; a withdrawn one is retired and never used again."


def written(path: Path, data: Any) -> None:
    """Write JSON, each entry of a list of objects on a line of its own."""
    lines = []
    for key, value in data.items():
        rows = isinstance(value, list) and value and isinstance(value[0], dict)
        body = "[\n" + ",\n".join(dump(row) for row in value) + "\n]" if rows else dump(value)
        lines.append(f"{dump(key)}: {body}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def dump(value: Any) -> str:
    """JSON on one line; NaN and infinities are refused."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def write_vectors(folder: Path, cases: Sequence[Case]) -> int:
    """Write all files of a version; a vector that is there already keeps its published numbers.

    Args:
        folder: where; vectors in it are the published ones.
        cases: with answers.

    Returns:
        The number of vectors.

    Raises:
        InputError: a published vector that would change by more than its tolerance, or in what it asks.
    """
    stored: dict[str, Case] = {}
    published: list[Id] = []
    if (folder / "ids.json").is_file():
        published = decode_ids(read_json(folder / "ids.json"))
        stored = {case.id: case for case in read_vectors(folder)}
    kept = [merged(stored[case.id], case) if case.id in stored else case for case in cases]
    ids = extended(published, kept)
    folder.mkdir(parents=True, exist_ok=True)
    written(folder / "ids.json", {"comment": IDS_COMMENT, "ids": [asdict(row) for row in ids]})
    written(folder / "schema.json", schema())
    for operation in OPERATIONS:
        if own := [case for case in kept if case.operation == operation]:
            write_operation(folder, operation, own)
    names = ["ids.json", "schema.json", *(f"{operation}.json" for operation in OPERATIONS)]
    names += [f"{operation}.safetensors" for operation in OPERATIONS]
    files = [file_entry(folder / name) for name in sorted(names) if (folder / name).is_file()]
    head = {"schema": INDEX_SCHEMA, "version": VERSION, "spec_version": SPEC_VERSION, "vectors": len(kept)}
    written(folder / "index.json", {**head, "files": files})
    return len(kept)


def write_operation(folder: Path, operation: str, cases: Sequence[Case]) -> None:
    """The JSON and the arrays of one operation; without safetensors metadata, so that equal content is equal bytes."""
    bounds = {name: {"bound": bound, "reason": reason} for name, (bound, reason) in TOLERANCES.items()}
    used = {case.tolerance for case in cases if case.error is None}
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "spec_version": SPEC_VERSION,
        "operation": operation,
        "tolerances": {name: bounds[name] for name in TOLERANCES if name in used},
        "cases": [case.data() for case in cases],
    }
    written(folder / f"{operation}.json", document)
    arrays = {f"{case.id}/{name}": a for case in cases for name, a in case.arrays().items()}
    path = folder / f"{operation}.safetensors"
    path.unlink(missing_ok=True)
    if arrays:
        path.write_bytes(save({name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}))


def file_entry(path: Path) -> dict[str, Any]:
    """Name, size and digest of a file."""
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def merged(stored: Case, made: Case) -> Case:
    """The published case, if what was made now says the same: questions exactly, answers within the tolerance.

    Answers are compared to the tolerance because exp, log, sin, cos, hypot and the order of sums differ in the last
    bits between platforms; on one platform they are equal.

    Raises:
        InputError: they differ.
    """
    where = f"vector {made.id}"
    if (stored.arguments, stored.error, stored.operation) != (made.arguments, made.error, made.operation):
        raise InputError(where, "other arguments", "as published; a changed vector has a new id")
    fault = inputs_difference(stored.inputs, made.inputs)
    if fault is None and made.error is None:
        same = stored.tolerance == made.tolerance
        fault = difference(stored, {**made.expected, **made.outputs}) if same else f"tolerance {made.tolerance}"
    if fault is not None:
        raise InputError(where, fault, "as published; a changed vector has a new id")
    return replace(stored, clauses=made.clauses, comment=made.comment)


def inputs_difference(stored: Mapping[str, Array], made: Mapping[str, Array]) -> str | None:
    """Where inputs differ: exactly, but for stds, which hold a sine."""
    if stored.keys() != made.keys():
        return f"inputs {sorted(made)}, published {sorted(stored)}"
    for name, array in stored.items():
        close = np.allclose(made[name], array, rtol=1e-14, atol=0.0) if name.startswith("stds") else False
        if made[name].dtype != array.dtype or not (close or np.array_equal(made[name], array, equal_nan=True)):
            return f"input {name} differs"
    return None


def read_vectors(folder: Path = FOLDER) -> list[Case]:
    """Read all vectors of a version.

    Raises:
        InputError: anything that is not as written: a missing or changed file, an unknown key, an array that no vector
            has, a digest that is not the id's.
    """
    index = read_json(folder / "index.json")
    found = (index.get("schema"), index.get("version")) if isinstance(index, dict) else None
    if found != (INDEX_SCHEMA, VERSION):
        raise InputError("index.schema, index.version", found, f"{(INDEX_SCHEMA, VERSION)}")
    d = check_keys(index, {"schema", "version", "spec_version", "vectors", "files"}, "index")
    names = [check_file(folder, entry, i) for i, entry in enumerate(items(d["files"], "index.files"))]
    cases = [
        case
        for operation in OPERATIONS
        if f"{operation}.json" in names
        for case in read_operation(folder, operation, f"{operation}.safetensors" in names)
    ]
    check_ids(decode_ids(read_json(folder / "ids.json")), cases)
    if integer(d["vectors"], "index.vectors") != len(cases):
        raise InputError("index.vectors", d["vectors"], str(len(cases)))
    return cases


def check_file(folder: Path, entry: Any, position: int) -> str:
    """Refuse a file whose name leaves the folder, or that is not what the index says."""
    where = f"index.files[{position}]"
    d = check_keys(entry, {"name", "bytes", "sha256"}, where)
    name, size = text(d["name"], f"{where}.name"), integer(d["bytes"], f"{where}.bytes")
    if NAME.fullmatch(name) is None:
        raise InputError(f"{where}.name", name, "a plain file name, *.json or *.safetensors")
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise InputError(f"{where}.name", name, "a file of the folder")
    if size > LIMIT or path.stat().st_size != size:
        raise InputError(f"size of {name}", path.stat().st_size, f"{size}, and at most {LIMIT}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != text(d["sha256"], f"{where}.sha256"):
        raise InputError(f"sha256 of {name}", "another", "as in the index")
    return name


def read_operation(folder: Path, operation: str, has_arrays: bool) -> list[Case]:
    """The vectors of one operation."""
    document = read_json(folder / f"{operation}.json")
    keys = {"schema", "version", "spec_version", "operation", "tolerances", "cases"}
    d = check_keys(document, keys, operation)
    found = (d["schema"], d["version"], d["operation"])
    if found != (SCHEMA, VERSION, operation):
        raise InputError(f"{operation}.schema, version, operation", found, f"{(SCHEMA, VERSION, operation)}")
    bounds = {name: {"bound": bound, "reason": reason} for name, (bound, reason) in TOLERANCES.items()}
    if not isinstance(d["tolerances"], dict) or any(bounds.get(n) != b for n, b in d["tolerances"].items()):
        raise InputError(f"{operation}.tolerances", d["tolerances"], "those of version 1")
    arrays = read_arrays(folder / f"{operation}.safetensors") if has_arrays else {}
    cases = [
        decode_case(operation, data, arrays, f"{operation}.cases[{i}]")
        for i, data in enumerate(items(d["cases"], f"{operation}.cases"))
    ]
    if strange := sorted(set(arrays) - {case.id for case in cases}):
        raise InputError(f"{operation}.safetensors", strange[0], "arrays of its vectors")
    return cases


def read_arrays(path: Path) -> dict[str, dict[str, dict[str, Array]]]:
    """Arrays by id, side and name."""
    check_header(path)
    try:
        loaded = load(path.read_bytes())
    except (SafetensorError, KeyError, ValueError) as error:
        raise InputError(path.name, str(error), "a valid safetensors file of bool, int64 and float64") from None
    found: dict[str, dict[str, dict[str, Array]]] = {}
    for key, array in loaded.items():
        match = ARRAY.fullmatch(key)
        if match is None or array.dtype.name not in ("float64", "int64", "bool"):
            raise InputError(f"array of {path.name}", (key, array.dtype.name), "ID/in.NAME or ID/out.NAME, 64 bits")
        found.setdefault(match["id"], {"in": {}, "out": {}})[match["side"]][match["name"]] = array
    return found


def decode_case(operation: str, data: Any, arrays: Mapping[str, Any], where: str) -> Case:
    """One vector from its JSON and its arrays."""
    bad = isinstance(data, dict) and "error" in data
    d = check_keys(data, CASE | ({"error"} if bad else {"tolerance", "expected", "outputs"}), where)
    name = text(d["id"], f"{where}.id")
    if IDENTIFIER.fullmatch(name) is None:
        raise InputError(f"{where}.id", name, "lower-case words with dashes")
    own = arrays.get(name, {"in": {}, "out": {}})
    case = Case(
        id=name,
        operation=operation,
        clauses=tuple(text(c, f"{where}.clauses") for c in items(d["clauses"], f"{where}.clauses")),
        comment=text(d["comment"], f"{where}.comment"),
        arguments=dict(check_mapping(d["arguments"], f"{where}.arguments")),
        inputs=own["in"],
        tolerance=Case.tolerance if bad else text(d["tolerance"], f"{where}.tolerance"),
        expected={} if bad else dict(check_mapping(d["expected"], f"{where}.expected")),
        outputs=own["out"],
        error=text(check_keys(d["error"], {"field"}, where)["field"], f"{where}.error") if bad else None,
    )
    if describe(case.inputs) != d["inputs"] or (describe(case.outputs) != ({} if bad else d["outputs"])):
        raise InputError(f"arrays of {name}", "others", "those that the JSON describes")
    if case.tolerance not in TOLERANCES or not case.clauses:
        raise InputError(f"{where}.tolerance, clauses", (case.tolerance, case.clauses), "a known one, at least one")
    if any(not np.isfinite(a).all() for a in [*case.outputs.values(), *([] if bad else case.inputs.values())]):
        raise InputError(f"arrays of {name}", "NaN or ±inf", "finite, but for inputs that are to be refused")
    return case


def check_mapping(data: Any, where: str) -> Mapping[str, Any]:
    """Refuse what is no JSON object."""
    if not isinstance(data, dict):
        raise InputError(where, type(data).__name__, "a JSON object")
    return data


def check_ids(ids: Sequence[Id], cases: Sequence[Case]) -> None:
    """Refuse vectors that are not exactly the ids that are not retired, with their content."""
    listed = {row.id: row for row in ids if not row.retired}
    for case in cases:
        row = listed.pop(case.id, None)
        if row is None:
            raise InputError("vector id", case.id, "listed in ids.json, once, and not retired")
        if row.sha256 != case.digest():
            raise InputError(f"vector {case.id}", case.digest(), f"{row.sha256}, as listed in ids.json")
    if listed:
        raise InputError("ids.json", sorted(listed)[0], "the id of a vector")
