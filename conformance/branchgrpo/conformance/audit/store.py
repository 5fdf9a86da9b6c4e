"""Results of stages on disk, so that an audit that was interrupted goes on where it stopped."""

import contextlib
import hashlib
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from branchgrpo.conformance.audit.context import Context, Data
from branchgrpo.conformance.audit.setting import described
from branchgrpo.conformance.subject_loading import SHORT

FORMAT = 2
PACKAGES = ("reference", "oracle", "optimized", "models", "training", "properties", "conformance")


def source_hash(implementation: str) -> str:
    """SHA-256 of every source file that a result may depend on, the audited module's among them."""
    files: set[Path] = set()
    for package in PACKAGES:
        for folder in importlib.import_module(f"branchgrpo.{package}").__path__:
            files |= set(Path(folder).rglob("*.py"))
    module = sys.modules.get(SHORT.get(implementation, implementation).partition(":")[0])
    if module is not None and getattr(module, "__file__", None):
        files |= set(Path(str(module.__file__)).parent.glob("*.py"))
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(str(file).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def context_key(implementation: str, context: Context) -> str:
    """What all stages of one audit depend on: sources, implementation, device, setting and versions."""
    config = context.setting.config
    files = [Path(config.plan)] if config.plan else []
    parts = {
        "format": FORMAT,
        "sources": source_hash(implementation),
        "implementation": implementation,
        "device": str(context.subject.device),
        "setting": described(context.setting),
        "audited": context.setting.identity.data(),
        "files": [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()],
        "expected": context.expected,
        "torch": torch.__version__,
        "python": sys.version,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read_stage(folder: Path, name: str, key: str) -> Data | None:
    """A stored result with the same key; None if there is none, or it is cut short or altered."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        stored = json.loads((folder / f"{name}.json").read_bytes())
        data = stored["data"]
        if stored["key"] == key and stored["sha256"] == hash_of(data):
            assert isinstance(data, dict)
            return data
    return None


def hash_of(data: Any) -> str:
    """Of the JSON text."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, allow_nan=False).encode()).hexdigest()


def write_stage(folder: Path, name: str, key: str, data: Data) -> Data:
    """Store a result whole or not at all; hand back what a later run will read."""
    folder.mkdir(parents=True, exist_ok=True)
    plain: Data = json.loads(json.dumps(data, allow_nan=False))
    text = json.dumps({"key": key, "sha256": hash_of(plain), "data": plain}, ensure_ascii=False)
    write_text(folder / f"{name}.json", text)
    return plain


def write_text(path: Path, text: str) -> None:
    """Replace a file by a complete new one."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
