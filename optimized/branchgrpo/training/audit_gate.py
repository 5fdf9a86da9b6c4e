"""What an audit says it has audited, and the gate that lets a run start only if that is what the run will do.

The gate reads the JSON of ``branchgrpo audit`` by this schema, and nothing of the code that wrote it. Keys that it
reads, all required:

=========================  =============================================================================================
``schema``, ``version``    ``"branchgrpo-audit"`` and 2
``digest``                 SHA-256 of the document without this key, as compact JSON with sorted keys
``spec_version``           of the specification that was checked
``implementation``         name of what was audited
``verdict``                ``{"decision": …, "reasons": [{"grade": …, "text": …}, …]}``
``audited.method``         ``plan`` (digest of the sampler), ``log_prob``, and the options ``fusion``,
                           ``normalization``, ``pruning`` and ``objective``
``audited.backbone``       ``source`` as it was named, and ``fingerprint`` of what it is
``audited.guidance``       ``null`` (the model's default) or ``{"kind": …, "scale": …}``
``audited.dtype``          of the arithmetic on states
``audited.model_dtype``    of the network's arithmetic
``audited.storage_dtype``  of kept states
``audited.noise``          ``keyed`` or ``fast``
``audited.sources``        SHA-256 of the sources of the audited implementation
=========================  =============================================================================================
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.method import Method
from branchgrpo.training.config.method import build_method
from branchgrpo.training.config.schema import TrainConfig

SCHEMA, VERSION = "branchgrpo-audit", 2
IMPLEMENTATION = "branchgrpo.optimized"
"""The implementation that trains."""
SPEC_VERSION = "1.0"
LARGEST = 2**26
"""Bytes of an audit that are read."""
EXECUTED = ("reference", "optimized", "models")
"""Packages whose sources decide what a rollout and an update compute."""
PASSING = "adopt"
CONDITIONAL = "adopt with conditions"


def encoded(value: Any) -> Any:
    """Options as JSON holds them; a dataclass carries its class, an infinity is a word."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: encoded(getattr(value, field.name)) for field in fields(value)}
        return {"class": type(value).__name__, **parts}
    if isinstance(value, tuple | list):
        return [encoded(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def digest_of(value: Any) -> str:
    """SHA-256 of JSON data: compact, keys sorted."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sources_digest() -> str:
    """SHA-256 over names and contents of every source file of the executed packages, wherever they are installed."""
    digest = hashlib.sha256()
    for package in EXECUTED:
        for folder in sorted(import_module(f"branchgrpo.{package}").__path__):
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{package}/{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def fingerprint(source: str, options: Mapping[str, Any]) -> str:
    """What a backbone is, wherever it lies: contents of a pipeline's transformers, or the options of a built-in one.

    Raises:
        InputError: a folder that holds no pipeline.
    """
    if not Path(source).expanduser().is_dir() and "/" not in source and not source.startswith("tiny-"):
        return digest_of([source, encoded(dict(options))])
    from branchgrpo.models.folder import PipelineFolder
    from branchgrpo.training.engine.pipeline_task import pipeline_folder

    folder = PipelineFolder.resolve(pipeline_folder(source))
    networks = [name for name in ("transformer", "transformer_2") if folder.has(name)]
    return folder.fingerprint(networks)


@dataclass(frozen=True)
class Identity:
    """What is audited, or trained.

    Attributes:
        method: the method with its options.
        source: of the backbone.
        options: of a built-in backbone.
        guidance: None is the model's default.
        dtype, model_dtype, storage_dtype, noise: see the schema.
    """

    method: Method
    source: str
    options: Mapping[str, Any]
    guidance: tuple[str, float] | None
    dtype: str
    model_dtype: str
    storage_dtype: str
    noise: str

    def data(self) -> dict[str, Any]:
        """The value of ``audited``."""
        method = self.method
        parts = ("fusion", "normalization", "pruning", "objective")
        guidance = None if self.guidance is None else dict(zip(("kind", "scale"), self.guidance, strict=True))
        return {
            "method": {
                "plan": digest_of(encoded(method.sampler)),
                "log_prob": method.log_prob.value,
                **{name: encoded(getattr(method, name)) for name in parts},
            },
            "backbone": {"source": self.source, "fingerprint": fingerprint(self.source, self.options)},
            "guidance": guidance,
            "dtype": self.dtype,
            "model_dtype": self.model_dtype,
            "storage_dtype": self.storage_dtype,
            "noise": self.noise,
            "sources": sources_digest(),
        }


def identity_of(config: TrainConfig) -> Identity:
    """What a run will do."""
    model, rollout = config.model, config.rollout
    scale = 1.0 if model.guidance_scale is None else model.guidance_scale
    return Identity(
        build_method(config.method),
        model.source,
        model.options,
        None if model.guidance is None else (model.guidance, scale),
        rollout.dtype,
        model.dtype,
        rollout.storage_dtype,
        rollout.noise,
    )


def read_audit(path: Path) -> dict[str, Any]:
    """The document of an audit: the file, or ``audit.json`` in a folder.

    Raises:
        InputError: a missing or huge file, one that is no audit, or one that was changed after it was written.
    """
    path = path / "audit.json" if path.is_dir() else path
    if not path.is_file():
        raise InputError("audit", str(path), "an existing audit.json: make it with branchgrpo audit --config RUN.toml")
    if path.stat().st_size > LARGEST:
        raise InputError(f"size of {path.name}", path.stat().st_size, f"at most {LARGEST} bytes")
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("audit", str(path), f"readable JSON ({type(error).__name__})") from None
    found = (document.get("schema"), document.get("version")) if isinstance(document, dict) else type(document).__name__
    if found != (SCHEMA, VERSION):
        raise InputError(f"{path.name}: schema, version", found, f"{(SCHEMA, VERSION)}: audit again")
    own = {name: value for name, value in document.items() if name != "digest"}
    try:
        whole = digest_of(own)
    except ValueError:
        whole = "none: it holds NaN or infinity"
    if document.get("digest") != whole:
        raise InputError(
            f"{path.name}: digest", document.get("digest"), f"{whole}: it was changed after it was written"
        )
    return dict(document)


def verdict_of(document: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The decision, and the texts of its reasons against and of its conditions.

    Raises:
        InputError: no verdict, or one that its own reasons contradict.
    """
    verdict = document.get("verdict")
    reasons = verdict.get("reasons") if isinstance(verdict, dict) else None
    if not isinstance(reasons, list) or not all(isinstance(reason, dict) for reason in reasons):
        raise InputError("audit: verdict", type(verdict).__name__, "an object with decision and reasons")
    grades = {reason.get("grade") for reason in reasons}
    decision = "reject" if "reject" in grades else CONDITIONAL if "condition" in grades else PASSING
    if verdict.get("decision") != decision:  # type: ignore[union-attr]
        raise InputError("audit: verdict", verdict.get("decision"), f"{decision!r}, as its reasons say")  # type: ignore[union-attr]
    texts = [str(reason.get("text")) for reason in reasons if reason.get("grade") in ("reject", "condition")]
    return decision, texts


def differing(audited: Any, wanted: Any, where: str = "audited") -> tuple[str, Any, Any] | None:
    """The first key, in the order of ``wanted``, at which two objects part: its name and both values."""
    if isinstance(wanted, dict) and isinstance(audited, dict) and where.count(".") < 4:
        for name, value in wanted.items():
            if where == "audited.backbone" and name == "source":
                continue
            found = differing(audited.get(name), value, f"{where}.{name}")
            if found is not None:
                return found
        return None
    return None if audited == wanted else (where, audited, wanted)


def check_audit(path: Path, config: TrainConfig, *, conditions: bool = False) -> None:
    """Let a run start only if an audit of what it will do has passed.

    Args:
        path: ``audit.json``, or the folder of the audit.
        config: the run.
        conditions: also pass *adopt with conditions*.

    Raises:
        InputError: no audit, a changed one, one that did not pass, or one of something else: names what differs.
    """
    document = read_audit(path)
    decision, reasons = verdict_of(document)
    if decision != PASSING and not (conditions and decision == CONDITIONAL):
        ask = ", or accept the conditions explicitly" if decision == CONDITIONAL else ""
        raise InputError("audit: verdict", f"{decision} ({reasons[0][:160]})", f"{PASSING!r}{ask}")
    for name, wanted in (("implementation", IMPLEMENTATION), ("spec_version", SPEC_VERSION)):
        if document.get(name) != wanted:
            raise InputError(f"audit: {name}", document.get(name), f"{wanted!r}, which trains")
    parted = differing(document.get("audited"), identity_of(config).data())
    if parted is not None:
        where, found, wanted = parted
        what = "the audited code has changed since" if where == "audited.sources" else "as in this run"
        raise InputError(f"audit: {where.removeprefix('audited.')}", found, f"{wanted!r}: {what}; audit the run again")
