"""Check the test vectors of spec/vectors with NumPy alone: read them, recompute every answer, compare.

    python examples/check_vectors.py [FOLDER]

Needs NumPy and nothing else. It is the example to follow in another language: the files are JSON and safetensors, the
rules are those of spec/. Exits with 1 if a file is not what the index says, or an answer is off by more than its bound.
"""

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy_families as families
import numpy_plans as plans
import numpy_steps as steps
import numpy_tail as tail
from numpy_plans import Refused

FOLDER = Path(__file__).resolve().parents[1] / "spec" / "vectors" / "v1"
NUMBERS = {"F64": "<f8", "I64": "<i8", "BOOL": "|b1"}
ON_DATA = {
    name: getattr(module, name)
    for module, names in {
        plans: "schedule splits plan options noise window windowed_plan depth_window step_weights",
        families: "granular_indices family counts",
    }.items()
    for name in names.split()
}
ON_ARRAYS = {
    name: getattr(module, name)
    for module, names in {
        steps: "transition branch_noise log_probability rollout singular_rollout objective",
        tail: "fuse normalize leaf_keys granular_advantages prune trained_subsets",
    }.items()
    for name in names.split()
}


def strict(name: str) -> Any:
    """JSON has no NaN and no infinity."""
    raise ValueError(f"{name} in JSON")


def read_arrays(content: bytes) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file: the header's length, a JSON header, then the numbers."""
    length = int.from_bytes(content[:8], "little")
    header, start = json.loads(content[8 : 8 + length], parse_constant=strict), 8 + length
    found = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        flat = np.frombuffer(content[start + first : start + last], dtype=NUMBERS[entry["dtype"]])
        found[name] = flat.reshape(entry["shape"])
    return found


def digest(operation: str, content: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    """What ids.json holds for a vector: SHA-256 over its operation, canonical JSON and arrays."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    found = hashlib.sha256(f"{operation}\n{text}".encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"\n{name} {array.dtype.name} {list(array.shape)}\n".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def same_data(found: Any, wanted: Any, bound: float) -> bool:
    """JSON data: numbers with a fraction within the bound times themselves, all else equal."""
    if isinstance(wanted, dict) and wanted.keys() == {"least", "most"}:
        return bool(wanted["least"] <= found <= wanted["most"])
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same_data(found[k], wanted[k], bound) for k in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(same_data(a, b, bound) for a, b in zip(found, wanted, strict=True))
    if isinstance(wanted, float):
        return bool(abs(found - wanted) <= bound * abs(wanted))
    return bool(found == wanted)


def same_array(found: Any, wanted: np.ndarray, bound: float) -> bool:
    """An array: shape, then the bound times the largest expected entry; integers and booleans equal."""
    found = np.asarray(found)
    if found.shape != wanted.shape:
        return False
    if wanted.dtype.kind != "f":
        return bool((found == wanted).all())
    return wanted.size == 0 or bool(np.abs(found - wanted).max() <= bound * np.abs(wanted).max())


def check(operation: str, case: dict[str, Any], arrays: dict[str, np.ndarray], bounds: dict[str, Any]) -> str | None:
    """Recompute one vector; what is wrong, or None."""
    inputs = {name[3:]: array for name, array in arrays.items() if name.startswith("in.")}
    outputs = {name[4:]: array for name, array in arrays.items() if name.startswith("out.")}
    try:
        if operation in ON_DATA:
            answer = ON_DATA[operation](case["arguments"])
        else:
            answer = ON_ARRAYS[operation](case["arguments"], inputs)
    except Refused as refused:
        named = "error" in case and case["error"]["field"] in refused.field
        return None if named else f"refused for {refused.field}, expected {case.get('error')}"
    if "error" in case:
        return f"accepted, but {case['error']['field']} is bad"
    bound = bounds[case["tolerance"]]["bound"]
    if answer.keys() != outputs.keys() | case["expected"].keys():
        return f"answers {sorted(answer)}"
    for name, wanted in case["expected"].items():
        if not same_data(answer[name], wanted, bound):
            return f"{name} = {answer[name]}, expected {wanted}"
    wrong = [name for name, wanted in outputs.items() if not same_array(answer[name], wanted, bound)]
    return f"arrays {', '.join(wrong)}" if wrong else None


def load(folder: Path) -> dict[str, bytes]:
    """Every file of the index, its size and digest checked."""
    files = {}
    for entry in json.loads((folder / "index.json").read_bytes(), parse_constant=strict)["files"]:
        content = (folder / Path(entry["name"]).name).read_bytes()
        if (len(content), hashlib.sha256(content).hexdigest()) != (entry["bytes"], entry["sha256"]):
            raise ValueError(f"{entry['name']} is not what the index says")
        files[entry["name"]] = content
    return files


def main(folder: Path = FOLDER) -> int:
    """Check a folder; a line for each operation and each failure."""
    files = load(folder)
    ids = {row["id"]: row["sha256"] for row in json.loads(files["ids.json"])["ids"] if not row["retired"]}
    failures = 0
    for operation in (*ON_DATA, *ON_ARRAYS):
        document = json.loads(files[f"{operation}.json"], parse_constant=strict)
        arrays = read_arrays(files.get(f"{operation}.safetensors", b"\2" + bytes(7) + b"{}"))
        by_id: dict[str, dict[str, np.ndarray]] = {}
        for name, array in arrays.items():
            by_id.setdefault(name.partition("/")[0], {})[name.partition("/")[2]] = array
        done: Counter[str] = Counter()
        for case in document["cases"]:
            own = by_id.get(case["id"], {})
            content = {key: case[key] for key in ("arguments", "tolerance", "expected", "error") if key in case}
            fault = check(operation, case, own, document["tolerances"])
            if digest(operation, content, own) != ids.pop(case["id"], None):
                fault = "its content is not what ids.json lists"
            done["wrong" if fault else "refused" if "error" in case else "equal"] += 1
            if fault:
                print(f"  {case['id']}: {fault}")
        failures += done["wrong"]
        print(f"{operation:20} {done['equal']:4} equal {done['refused']:4} refused {done['wrong']:4} wrong")
    for name in ids:
        print(f"  {name}: listed, but no vector")
    return 1 if failures or ids else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
