"""``branchgrpo train --require-audit``: no run without a passing audit of what it is going to do."""

import json
from pathlib import Path
from typing import Any

from branchgrpo.conformance.adapters.optimized import OptimizedImplementation
from branchgrpo.conformance.audit.config import AuditConfig, config_from
from branchgrpo.conformance.audit.setting import make_setting
from branchgrpo.models.tiny.folders import TINY, tiny_pipeline
from branchgrpo.reference.errors import BranchGRPOError, InputError, OptionError
from branchgrpo.training.config.method import build_method
from branchgrpo.training.config.schema import TrainConfig

LARGEST = 2**26
"""Bytes of an audit that are read."""
PASSING = ("adopt", "adopt with conditions")


def read_audit(path: Path) -> dict[str, Any]:
    """The document of an audit: the file, or ``audit.json`` in a folder.

    Raises:
        InputError: a missing or huge file, or one that is no audit.
    """
    path = path / "audit.json" if path.is_dir() else path
    if not path.is_file():
        raise InputError("--require-audit", str(path), "an audit.json, as `branchgrpo audit` writes it")
    if path.stat().st_size > LARGEST:
        raise InputError(f"size of {path.name}", path.stat().st_size, f"at most {LARGEST} bytes")
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("--require-audit", str(path), f"readable JSON ({error})") from None
    known = isinstance(document, dict) and document.get("schema") == "branchgrpo-audit" and document.get("version") == 1
    if not known or not isinstance(document.get("setting"), dict) or not isinstance(document.get("verdict"), dict):
        raise InputError("--require-audit", str(path), "an audit of version 1")
    return dict(document)


def audited(document: dict[str, Any]) -> AuditConfig:
    """The setting that was audited.

    Raises:
        InputError: a setting that cannot be read.
    """
    known = {name: value for name, value in document["setting"].items() if name != "method"}
    try:
        return config_from(known)
    except BranchGRPOError as error:
        raise InputError("--require-audit: setting", known, f"readable ({error})") from None


def backbone_of(config: TrainConfig) -> str:
    """The run's backbone, as an audit names it: a word, or a folder's full path."""
    source = config.model.source
    if source == "digits":
        return source if not config.model.options else f"digits with options {dict(config.model.options)}"
    if source in TINY:
        return str(tiny_pipeline(source).resolve())
    return str(Path(source).expanduser().resolve()) if Path(source).expanduser().is_dir() else source


def check_audit(path: Path, config: TrainConfig) -> None:
    """Let a run start only if an audit of the same plan, backbone, dtypes and noise source passed.

    Args:
        path: ``audit.json``, or the folder of the audit.
        config: the run.

    Raises:
        InputError: no audit, or one that rejects.
        OptionError: an audit of something else; the message names what differs, and what to audit.
    """
    document = read_audit(path)
    decision = document["verdict"].get("decision")
    if decision not in PASSING:
        raise InputError("--require-audit: verdict", decision, f"one of {list(PASSING)}")
    if document.get("implementation") != OptimizedImplementation.name:
        named = document.get("implementation")
        raise InputError("--require-audit: implementation", named, f"{OptimizedImplementation.name!r}, which trains")
    found, method = audited(document), build_method(config.method)
    audited_method = make_setting(found).method
    if audited_method.sampler != method.sampler:
        raise OptionError("--require-audit: plan", audited_method.name, f"the plan of this run, {method.name}")
    folder = found.backbone if found.backbone in ("gaussian", "network", "digits") else Path(found.backbone).resolve()
    for name, here, wanted in (
        ("log_prob", audited_method.log_prob.value, method.log_prob.value),
        ("backbone", str(folder), backbone_of(config)),
        ("dtype", found.dtype, config.rollout.dtype),
        ("dtype", found.dtype, config.model.dtype),
        ("storage_dtype", found.storage_dtype, config.rollout.storage_dtype),
        ("noise", found.noise, config.rollout.noise),
    ):
        if here != wanted:
            raise OptionError(f"--require-audit: audit.{name}", here, f"{wanted!r} as in this run: audit it with that")
