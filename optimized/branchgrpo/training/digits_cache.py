"""A cache of trained weights outside the repository, keyed by configuration and training code."""

import hashlib
import json
import logging
import platform
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from branchgrpo.models.cache_folder import cache_directory
from branchgrpo.training.digits_threads import one_thread

FORMAT = 1
Network = TypeVar("Network", bound=nn.Module)
logger = logging.getLogger(__name__)


def cache_key(config: Any, code: Sequence[ModuleType]) -> tuple[str, dict[str, Any]]:
    """A key that changes with the configuration, the training code, torch and the processor's family.

    Args:
        config: a frozen dataclass with everything the weights depend on.
        code: modules whose source decides what training does.

    Returns:
        The key, and the description it is the hash of.
    """
    sources = {module.__name__: hash_bytes(Path(str(module.__file__)).read_bytes()) for module in code}
    described = {"format": FORMAT, "config": asdict(config), "code": sources}
    described |= {"torch": torch.__version__, "machine": platform.machine()}
    return hash_bytes(json.dumps(described, sort_keys=True).encode())[:20], described


def hash_bytes(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_weights(record: Path) -> dict[str, Tensor] | None:
    """Weights that a record names, or None (with a warning in the log, if there was something to read).

    The record (JSON) is written last and carries the hash of the weights file: what is missing, cut short or altered is
    found here.
    """
    if not record.exists():
        return None
    try:
        described = json.loads(record.read_bytes())
        content = (record.parent / described["weights"]).read_bytes()
        if hash_bytes(content) != described["sha256"]:
            raise ValueError("the weights file does not have the recorded hash")
        return load_tensors(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("cache entry %s is unusable (%s): training again", record, error)
        return None


def write_weights(record: Path, weights: dict[str, Tensor], described: dict[str, Any]) -> None:
    """Write the weights under a name that carries their hash, then the record that makes them count."""
    content = save_tensors({name: tensor.contiguous() for name, tensor in weights.items()})
    digest = hash_bytes(content)
    file = record.with_name(f"{record.stem}-{digest[:12]}.safetensors")
    write_atomically(file, content)
    entry = {"weights": file.name, "sha256": digest, "made_from": described}
    write_atomically(record, json.dumps(entry, indent=1, sort_keys=True).encode())


def cached(
    name: str, config: Any, code: Sequence[ModuleType], build: Callable[[], Network], train: Callable[[], Network]
) -> Network:
    """A trained network from the cache, or trained now and kept.

    An unusable entry is trained again and replaced, with a warning in the log of this module.

    Args:
        name: what the file names start with.
        config: see ``cache_key``.
        code: see ``cache_key``.
        build: makes the network that the weights are loaded into.
        train: trains it, when the cache has none.

    Raises:
        OptionError: ``$BRANCHGRPO_CACHE`` is not a directory.
    """
    key, described = cache_key(config, code)
    record = cache_directory() / f"{name}-{key}.json"
    weights = read_weights(record)
    if weights is None:
        with one_thread():  # the same weights whatever the threads of the caller
            trained = train()
        write_weights(record, trained.state_dict(), described)
        return trained
    network = build()
    network.load_state_dict(weights)
    return network.eval()
