"""The JSON schema (draft 2020-12) of the vectors' files, from the same names as the code that reads them."""

from dataclasses import fields
from typing import Any

from branchgrpo.conformance.vectors.cases import INDEX_SCHEMA, OPERATIONS, SCHEMA, TOLERANCES, VERSION
from branchgrpo.conformance.vectors.parts import KINDS
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.options import Fusion, Normalization, Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseRole
from branchgrpo.reference.windows import WindowSchedule

Schema = dict[str, Any]
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
TEXT: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
REAL: Schema = {"oneOf": [NUMBER, {"const": "inf"}]}
WORD: Schema = {"type": "string", "pattern": "^-?[0-9]+$", "description": "an integer that may not fit 53 bits"}
SHA: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
DTYPE: Schema = {"enum": ["float64", "float32"]}
STORAGE: Schema = {"enum": ["float64", "float32", "bfloat16"]}
REDUCTION: Schema = {"enum": ["sum", "mean"]}


def list_of(items: Schema) -> Schema:
    """An array of one kind of items."""
    return {"type": "array", "items": items}


def closed(**properties: Schema) -> Schema:
    """An object with exactly these keys."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def keys_of(kind: type[Any]) -> Schema:
    """An object with the keys of options: values are judged by the specification, since vectors hold bad ones too."""
    return closed(**{field.name: {} for field in fields(kind)})


def ref(name: str) -> Schema:
    """A definition."""
    return {"$ref": f"#/$defs/{name}"}


def arguments() -> dict[str, Schema]:
    """The arguments of every operation."""
    sampling: dict[str, Schema] = {
        "prompts": list_of(INTEGER), "latent": list_of(INTEGER), "dtype": DTYPE, "storage": STORAGE,
        "reduction": REDUCTION, "iteration": INTEGER, "guidance": ref("guidance"),
    }  # fmt: skip
    trained = {name: sampling[name] for name in ("prompts", "dtype", "storage", "reduction", "guidance")}
    at = {"iteration": INTEGER, "seed": INTEGER}
    scored = closed(plan=ref("plan"), weights=list_of(REAL), normalization=ref("normalization"))
    key = dict.fromkeys(("seed", "iteration", "prompt", "root", "depth", "node"), WORD)
    plan_counts = closed(plan=ref("plan"), rules=list_of(ref("rule")), iteration=INTEGER)
    return {
        "schedule": closed(steps=NUMBER, shift=REAL),
        "splits": closed(steps=INTEGER, splits=list_of(NUMBER), factor=INTEGER),
        "plan": closed(plan=ref("plan")),
        "options": closed(kind={"enum": sorted(KINDS)}, options={"type": "object"}),
        "noise": closed(**key, role={"enum": [role.value for role in NoiseRole]}, shape=list_of(INTEGER)),
        "window": closed(window=ref("window"), **at),
        "windowed_plan": closed(plan=ref("plan"), window=ref("window"), group=INTEGER, **at),
        "depth_window": closed(rule=keys_of(KINDS["depth_window"]), steps=INTEGER, iteration=INTEGER),
        "granular_indices": closed(start=INTEGER, steps=INTEGER, granularity=NUMBER, anchor=TEXT),
        "family": closed(family=ref("family")),
        "counts": {"oneOf": [closed(family=ref("family")), plan_counts]},
        "step_weights": closed(stds=list_of(NUMBER), weighting=TEXT),
        "transition": closed(plan=ref("plan"), step=INTEGER, dtype=DTYPE),
        "branch_noise": closed(spread=REAL, dtype=DTYPE),
        "log_probability": closed(std=NUMBER, reduction=REDUCTION, dtype=DTYPE, storage=STORAGE),
        "rollout": closed(plan=ref("plan"), **sampling),
        "fuse": closed(plan=ref("plan"), prompts=list_of(INTEGER), fusion=ref("fusion")),
        "normalize": scored,
        "leaf_keys": scored,
        "prune": plan_counts,
        "trained_subsets": closed(plan=ref("plan"), prompts=list_of(INTEGER), **at),
        "objective": closed(plans=list_of(ref("plan")), objective=ref("objective"), frozen=BOOLEAN, **trained),
        "singular_rollout": closed(family=ref("family"), **sampling),
        "granular_advantages": closed(
            family=ref("family"), k=INTEGER, weights=list_of(REAL), normalization=ref("normalization")
        ),
    }


def cases(name: str) -> Schema:
    """The vectors of one operation: with an answer, or with the field at fault."""
    own: dict[str, Schema] = {
        "id": {"type": "string", "pattern": f"^{name}-[a-z0-9_-]+$"},
        "clauses": {**list_of({"type": "string", "pattern": "^[A-Z]{3,}-[0-9]+$"}), "minItems": 1},
        "comment": TEXT,
        "arguments": ref(f"arguments_{name}"),
        "inputs": ref("arrays"),
    }
    good: dict[str, Schema] = {
        "tolerance": {"enum": list(TOLERANCES)},
        "expected": {"type": "object"},
        "outputs": ref("arrays"),
    }
    return {**list_of({"oneOf": [closed(**own, **good), closed(**own, error=closed(field=TEXT))]}), "minItems": 10}


def documents() -> dict[str, Schema]:
    """The three kinds of documents, and one of each operation."""
    head = {"version": {"const": VERSION}, "spec_version": TEXT}
    file = closed(name={"type": "string", "pattern": r"^[a-z0-9_]+\.(json|safetensors)$"}, bytes=INTEGER, sha256=SHA)
    bounds = {name: closed(bound=NUMBER, reason=TEXT) for name in TOLERANCES}
    operations = {
        f"operation_{name}": closed(
            schema={"const": SCHEMA},
            **head,
            operation={"const": name},
            tolerances={"type": "object", "properties": bounds, "additionalProperties": False},
            cases=cases(name),
        )
        for name in OPERATIONS
    }
    return {
        "index": closed(schema={"const": INDEX_SCHEMA}, **head, vectors=INTEGER, files=list_of(file)),
        "ids": closed(comment=TEXT, ids=list_of(closed(id=TEXT, operation=TEXT, sha256=SHA, retired=BOOLEAN))),
        **operations,
    }


def definitions() -> dict[str, Schema]:
    """What the documents share."""
    array = closed(dtype={"enum": ["float64", "int64", "bool"]}, shape=list_of(INTEGER))
    plan, family = keys_of(Plan), keys_of(PlanFamily)
    kernel = closed(kind=TEXT, eta=REAL)
    plan["properties"] |= {"sigmas": list_of(NUMBER), "kernels": list_of(kernel), "spreads": list_of(REAL)}
    family["properties"] |= {"sigmas": list_of(NUMBER), "kernel": kernel, "ks": list_of(INTEGER)}
    rules = [
        closed(rule={"const": name}, **keys_of(KINDS[name])["properties"])
        for name in ("parent_top1", "extreme_b", "depth_window")
    ]
    return {
        "arrays": {"type": "object", "additionalProperties": array},
        "plan": plan,
        "family": family,
        "rule": {"oneOf": rules},
        "guidance": closed(kind=TEXT, scale=NUMBER),
        "fusion": keys_of(Fusion),
        "normalization": keys_of(Normalization),
        "objective": keys_of(Objective),
        "window": keys_of(WindowSchedule),
        **{f"arguments_{name}": found for name, found in arguments().items()},
        **documents(),
    }


def schema() -> Schema:
    """The schema of every JSON file of a version but itself."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "branchgrpo test vectors, version 1",
        "oneOf": [ref(name) for name in documents()],
        "$defs": definitions(),
    }
