"""Reading and writing traces: bounded, strict, and without executing anything (TRACE-1, TRACE-5 … TRACE-8)."""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
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
)
from branchgrpo.conformance.record import FIELDS, Level, Record, RewardInfo, validate_record
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.options import Fusion, Normalization, Objective
from branchgrpo.reference.protocols import Prompt
from branchgrpo.reference.types import Reduction

SCHEMA = "branchgrpo-trace/1"
JSON_LIMIT = 64 * 2**20
"""Bytes of JSON that are read: about a million prompts of 60 characters."""
HEADER_LIMIT = 100 * 10**6
"""Bytes of header that the safetensors format itself allows."""
KEYS = {
    "plan", "member", "iteration", "prompts", "reduction", "fusion", "normalization", "pruning", "objective",
    "reward_models", "dtype", "storage_dtype",
}  # fmt: skip
ARRAY = re.compile(r"(?P<record>\d{1,6})/(?P<field>[a-z_]+)(?:/(?P<depth>\d{1,6}))?")


def json_path(path: Path) -> Path:
    """The JSON of the same stem."""
    return path.with_suffix(".json")


def write_trace(path: Path, records: Sequence[Record], implementation: str) -> None:
    """Write a trace as ``path`` (.safetensors) and its JSON.

    Args:
        path: file name that ends in ``.safetensors``.
        records: at least one.
        implementation: name of what was traced.
    """
    check_suffix(path)
    arrays: dict[str, Tensor] = {}
    for r, record in enumerate(records):
        validate_record(record, str(r))
        arrays[f"{r}/stds"] = record.stds
        if record.rewards is not None:
            arrays[f"{r}/rewards"] = record.rewards
        for field, level in record.levels.items():
            arrays |= {f"{r}/{field}/{depth}": array for depth, array in level.items()}
    save_file({name: array.detach().cpu().contiguous() for name, array in arrays.items()}, path)
    document = {"schema": SCHEMA, "implementation": implementation, "records": [encode_record(r) for r in records]}
    json_path(path).write_text(json.dumps(document, allow_nan=False, indent=1, ensure_ascii=False), encoding="utf-8")


def encode_record(record: Record) -> dict[str, Any]:
    """The JSON part of a record."""
    plain = {key: encode(getattr(record, key)) for key in KEYS - {"pruning"}}
    return {**plain, "pruning": [encode_rule(rule) for rule in record.pruning]}


def check_suffix(path: Path) -> None:
    """Refuse a file name that is not ``*.safetensors``."""
    if path.suffix != ".safetensors":
        raise InputError("trace", str(path), "a file named *.safetensors, with its JSON beside it")


def read_trace(path: Path) -> tuple[str, list[Record]]:
    """Read a trace.

    Returns:
        The implementation's name, and the records.

    Raises:
        InputError: anything that is not a well-formed trace of schema 1, by the name of what is at fault.
    """
    check_suffix(path)
    document = check_keys(read_json(json_path(path)), {"schema", "implementation", "records"}, "trace")
    if document["schema"] != SCHEMA:
        raise InputError("trace.schema", document["schema"], repr(SCHEMA))
    if not isinstance(document["implementation"], str):
        raise InputError("trace.implementation", document["implementation"], "a string")
    parts = items(document["records"], "trace.records")
    if not parts:
        raise InputError("trace.records", [], "at least one record")
    arrays = read_arrays(path, len(parts))
    records = [decode_record(part, arrays[r], f"records[{r}]") for r, part in enumerate(parts)]
    for r, record in enumerate(records):
        validate_record(record, str(r))
    return document["implementation"], records


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


def read_arrays(path: Path, records: int) -> list[dict[str, dict[int | None, Tensor]]]:
    """The arrays by record, field and depth; names that the schema does not have are refused (TRACE-3)."""
    check_header(path)
    arrays: list[dict[str, dict[int | None, Tensor]]] = [{} for _ in range(records)]
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not iterable
                found = ARRAY.fullmatch(name)
                known = (
                    found is not None
                    and found["field"] in {*FIELDS, "stds", "rewards"}
                    and int(found["record"]) < records
                )
                if found is None or not known or (found["depth"] is None) != (found["field"] in ("stds", "rewards")):
                    raise InputError("array", name, "named r/FIELD or r/FIELD/d as spec/trace.md lists them")
                depth = None if found["depth"] is None else int(found["depth"])
                arrays[int(found["record"])].setdefault(found["field"], {})[depth] = file.get_tensor(name)
    except SafetensorError as error:
        raise InputError(path.name, str(error), "a valid safetensors file") from None
    return arrays


def decode_record(data: Any, arrays: Mapping[str, dict[int | None, Tensor]], where: str) -> Record:
    """A record from its JSON and its arrays."""
    d = check_keys(data, KEYS, where)
    if "stds" not in arrays:
        raise InputError(f"{where}/stds", "missing", "present in every trace")
    prompts = [check_keys(p, {"id", "text"}, f"{where}.prompts") for p in items(d["prompts"], f"{where}.prompts")]
    models = [
        check_keys(m, {"name", "weight"}, f"{where}.reward_models")
        for m in items(d["reward_models"], f"{where}.reward_models")
    ]
    member = None if d["member"] is None else items(d["member"], f"{where}.member")
    if member is not None and len(member) != 2:
        raise InputError(f"{where}.member", member, "null or [k, λ]")
    if d["reduction"] not in [r.value for r in Reduction]:
        raise InputError(f"{where}.reduction", d["reduction"], f"one of {[r.value for r in Reduction]}")
    for key in ("dtype", "storage_dtype"):
        if not isinstance(getattr(torch, str(d[key]), None), torch.dtype):
            raise InputError(f"{where}.{key}", d[key], "the name of a torch dtype, such as float32")
    levels: dict[str, Level] = {}
    for field, level in arrays.items():
        if field not in ("stds", "rewards"):
            levels[field] = {depth: array for depth, array in level.items() if depth is not None}
    rules = items(d["pruning"], f"{where}.pruning")
    return Record(
        plan=decode_plan(d["plan"], f"{where}.plan"),
        member=None
        if member is None
        else (integer(member[0], f"{where}.member"), integer(member[1], f"{where}.member")),
        iteration=integer(d["iteration"], f"{where}.iteration"),
        prompts=tuple(Prompt(integer(p["id"], f"{where}.prompts.id"), str(p["text"])) for p in prompts),
        reduction=Reduction(d["reduction"]),
        fusion=decode_options(Fusion, d["fusion"], f"{where}.fusion"),
        normalization=decode_options(Normalization, d["normalization"], f"{where}.normalization"),
        pruning=tuple(decode_rule(rule, f"{where}.pruning[{i}]") for i, rule in enumerate(rules)),
        objective=decode_options(Objective, d["objective"], f"{where}.objective"),
        reward_models=tuple(
            RewardInfo(str(m["name"]), real(m["weight"], f"{where}.reward_models.weight")) for m in models
        ),
        dtype=d["dtype"],
        storage_dtype=d["storage_dtype"],
        stds=arrays["stds"][None].double(),
        rewards=arrays["rewards"][None] if "rewards" in arrays else None,
        levels=levels,
    )
