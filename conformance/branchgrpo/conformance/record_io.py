"""Reading and writing traces: bounded, strict, and without executing anything (TRACE-5 … TRACE-8)."""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from branchgrpo.conformance.codec import (
    check_keys,
    decode_options,
    decode_plan,
    decode_rule,
    encode,
    encode_rule,
    integer,
    items,
    real,
    text,
)
from branchgrpo.conformance.record import FIELDS, Dtypes, Record, RewardInfo, validate_record
from branchgrpo.conformance.rows import STEPS, STRUCTURE, check_structure, split_rows, step_stds, to_rows
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.options import Fusion, Normalization, Objective
from branchgrpo.reference.protocols import Prompt
from branchgrpo.reference.types import Reduction
from branchgrpo.reference.windows import WindowSchedule

SCHEMA, VERSION, SPEC_VERSION = "branchgrpo-trace", 1, "1.0"
JSON_LIMIT = 64 * 2**20
"""Bytes of JSON that are read: about a million prompts of 60 characters."""
HEADER_LIMIT = 100 * 10**6
"""Bytes of header that the safetensors format itself allows."""
TOP = {"schema", "version", "spec_version", "implementation", "records"}
KEYS = {
    "plan", "member", "window", "prompts", "iteration", "seed", "reduction", "dtypes", "rewards", "fusion",
    "normalization", "pruning", "objective",
}  # fmt: skip
NEEDED = (*STRUCTURE, *STEPS, "edge.std")
ARRAYS = {*NEEDED, "leaf.reward", *(field.array for field in FIELDS.values())}
NAME = re.compile(r"(?P<record>0|[1-9]\d{0,5})/(?P<array>[a-z_.]+)")


def json_path(path: Path) -> Path:
    """The JSON of the same stem."""
    return path.with_suffix(".json")


def write_trace(path: Path, records: Sequence[Record], implementation: str, version: str) -> None:
    """Write a trace as ``path`` (.safetensors) and its JSON.

    Args:
        path: file name that ends in ``.safetensors``.
        records: at least one.
        implementation, version: of what was traced.
    """
    check_suffix(path)
    arrays: dict[str, Tensor] = {}
    for r, record in enumerate(records):
        validate_record(record, str(r))
        arrays |= {f"{r}/{name}": array.detach().cpu().contiguous() for name, array in to_rows(record).items()}
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "spec_version": SPEC_VERSION,
        "implementation": {"name": implementation, "version": version},
        "records": [encode_record(record) for record in records],
    }
    save_file(arrays, path)
    json_path(path).write_text(json.dumps(document, allow_nan=False, indent=1, ensure_ascii=False), encoding="utf-8")


def encode_record(record: Record) -> dict[str, Any]:
    """The JSON part of a record."""
    plain = {key: encode(getattr(record, key)) for key in KEYS - {"pruning", "rewards"}}
    rules = [encode_rule(rule) for rule in record.pruning]
    return {**plain, "pruning": rules, "rewards": encode(record.reward_models)}


def check_suffix(path: Path) -> None:
    """Refuse a file name that is not ``*.safetensors``."""
    if path.suffix != ".safetensors":
        raise InputError("trace", str(path), "a file named *.safetensors, with its JSON beside it")


def read_trace(path: Path) -> tuple[str, list[Record]]:
    """Read a trace.

    Returns:
        The implementation's name and version, and the records.

    Raises:
        InputError: anything that is not a well-formed trace, by the name of what is at fault.
        PlanError, OptionError: a plan or options that the specification does not allow.
    """
    check_suffix(path)
    document = read_json(json_path(path))
    found = (document.get("schema"), document.get("version")) if isinstance(document, dict) else None
    if found != (SCHEMA, VERSION):
        raise InputError("trace.schema, trace.version", found, f"{(SCHEMA, VERSION)}")
    check_keys(document, TOP, "trace")
    who = check_keys(document["implementation"], {"name", "version"}, "trace.implementation")
    parts = items(document["records"], "trace.records")
    if not parts:
        raise InputError("trace.records", [], "at least one record")
    arrays = read_arrays(path, len(parts))
    records = [decode_record(part, arrays[r], r) for r, part in enumerate(parts)]
    return f"{text(who['name'], 'name')} {text(who['version'], 'version')}", records


def read_json(path: Path) -> Any:
    """Parse strict JSON of bounded size and depth (TRACE-6, TRACE-7)."""
    if not path.is_file():
        raise InputError("trace", str(path), "an existing file, of the same stem as the arrays")
    if path.stat().st_size > JSON_LIMIT:
        raise InputError(f"size of {path.name}", path.stat().st_size, f"at most {JSON_LIMIT} bytes")

    def refuse(constant: str) -> NoReturn:
        raise InputError(path.name, constant, "JSON without NaN and infinities")

    try:
        return json.loads(path.read_bytes(), parse_constant=refuse)
    except RecursionError:
        raise InputError(path.name, "nested too deeply", "nested as spec/trace.md describes") from None
    except InputError:
        raise
    except ValueError as error:
        raise InputError(path.name, str(error), "valid UTF-8 JSON") from None


def check_header(path: Path) -> None:
    """Refuse what is not a safetensors file before the library maps it: a pickle, a truncated or foreign file."""
    if not path.is_file():
        raise InputError("trace", str(path), "an existing file")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(9)
    length = struct.unpack("<Q", head[:8])[0] if len(head) == 9 else size
    if head[8:9] != b"{" or length > min(size - 8, HEADER_LIMIT):
        raise InputError(path.name, "another format, or truncated", "a safetensors file")


def read_arrays(path: Path, records: int) -> list[dict[str, Tensor]]:
    """The arrays of every record by name; names that the schema does not have are refused (TRACE-7)."""
    check_header(path)
    arrays: list[dict[str, Tensor]] = [{} for _ in range(records)]
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not iterable
                found = NAME.fullmatch(name)
                if found is None or found["array"] not in ARRAYS or int(found["record"]) >= records:
                    raise InputError(
                        "array", name, f"named i/NAME, i below {records}, NAME as spec/trace.md lists them"
                    )
                arrays[int(found["record"])][found["array"]] = file.get_tensor(name)
    except SafetensorError as error:
        raise InputError(path.name, str(error), "a valid safetensors file") from None
    return arrays


def decode_record(data: Any, arrays: Mapping[str, Tensor], index: int) -> Record:
    """A record from its JSON and its arrays."""
    where = f"records[{index}]"
    d = check_keys(data, KEYS, where)
    plan = decode_plan(d["plan"], f"{where}.plan")
    for name in NEEDED:
        if name not in arrays:
            raise InputError(f"{index}/{name}", "missing", "present in every trace")
    check_structure(plan, arrays, str(index))
    names = {field.array: name for name, field in FIELDS.items()}
    record = Record(
        plan=plan,
        iteration=integer(d["iteration"], f"{where}.iteration"),
        prompts=tuple(decode_prompt(p, f"{where}.prompts[{i}]") for i, p in enumerate(items(d["prompts"], where))),
        reduction=decode_reduction(d["reduction"], f"{where}.reduction"),
        dtypes=decode_options(Dtypes, d["dtypes"], f"{where}.dtypes"),
        reward_models=tuple(
            decode_reward(m, f"{where}.rewards[{i}]") for i, m in enumerate(items(d["rewards"], where))
        ),
        fusion=decode_options(Fusion, d["fusion"], f"{where}.fusion"),
        normalization=decode_options(Normalization, d["normalization"], f"{where}.normalization"),
        pruning=tuple(decode_rule(r, f"{where}.pruning[{i}]") for i, r in enumerate(items(d["pruning"], where))),
        objective=decode_options(Objective, d["objective"], f"{where}.objective"),
        stds=step_stds(plan, arrays["edge.std"], str(index)),
        levels={names[a]: split_rows(plan, names[a], rows, str(index)) for a, rows in arrays.items() if a in names},
        rewards=arrays.get("leaf.reward"),
        member=decode_member(d["member"], f"{where}.member"),
        window=None if d["window"] is None else decode_options(WindowSchedule, d["window"], f"{where}.window"),
        seed=None if d["seed"] is None else integer(d["seed"], f"{where}.seed"),
    )
    validate_record(record, str(index))
    return record


def decode_prompt(data: Any, where: str) -> Prompt:
    """A prompt: id and text."""
    d = check_keys(data, {"id", "text"}, where)
    return Prompt(integer(d["id"], f"{where}.id"), text(d["text"], f"{where}.text"))


def decode_reward(data: Any, where: str) -> RewardInfo:
    """A reward model: name, version and weight."""
    d = check_keys(data, {"name", "version", "weight"}, where)
    return RewardInfo(text(d["name"], f"{where}.name"), text(d["version"], where), real(d["weight"], f"{where}.weight"))


def decode_reduction(value: Any, where: str) -> Reduction:
    """The reduction of log-probabilities by name."""
    if value not in [reduction.value for reduction in Reduction]:
        raise InputError(where, value, f"one of {[reduction.value for reduction in Reduction]}")
    return Reduction(value)


def decode_member(value: Any, where: str) -> tuple[int, int] | None:
    """(k, λ), or None."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise InputError(where, value, "null or [k, λ]")
    return integer(value[0], where), integer(value[1], where)
