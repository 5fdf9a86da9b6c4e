"""Published checkpoints: where they are, what is in them, and a fingerprint for the logs."""

import hashlib
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from branchgrpo.reference.errors import InputError

SAMPLE = 1 << 20
"""Bytes read from either end of a file for its fingerprint: the zip directory at the end of a checkpoint holds the
checksum of every tensor, so different weights differ there."""


def find_checkpoint(source: str | Path, download: Callable[..., str] | None = None) -> Path:
    """A local file, or ``repository:file`` on the model hub, downloaded once into the hub's cache.

    Args:
        source: path, or ``owner/name:file``.
        download: in place of ``huggingface_hub.hf_hub_download``.

    Raises:
        InputError: neither a file nor a hub reference.
    """
    path = Path(source)
    if path.is_file():
        return path
    repository, _, file = str(source).partition(":")
    if repository.count("/") != 1 or not file:
        raise InputError("checkpoint", str(source), "an existing file, or owner/name:file on the model hub")
    if download is None:
        from huggingface_hub import hf_hub_download

        download = hf_hub_download
    return Path(download(repo_id=repository, filename=file))


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint (``.safetensors``, or a pickle of tensors only), unwrapped from ``state_dict``.

    Raises:
        InputError: not a mapping of names to tensors.
    """
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(t, Tensor) for t in content.values()):
        raise InputError(f"checkpoint {path.name}", type(content).__name__, "a mapping of names to tensors")
    return dict(content)


def check_shapes(name: str, state: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Every expected tensor is there with its shape, and no other.

    Raises:
        InputError: names the first missing, unknown or misshapen tensors.
    """
    missing = sorted(expected.keys() - state.keys())
    unknown = sorted(state.keys() - expected.keys())
    wrong = sorted(k for k in expected.keys() & state.keys() if tuple(state[k].shape) != expected[k])
    if missing:
        raise InputError(f"checkpoint of {name}", f"without {missing[:3]} ({len(missing)} missing)", "complete")
    if unknown:
        raise InputError(f"checkpoint of {name}", f"with {unknown[:3]} ({len(unknown)} unknown)", "of this model only")
    for key in wrong:
        raise InputError(f"checkpoint of {name}: {key}: shape", tuple(state[key].shape), str(expected[key]))


def fingerprint(path: Path) -> str:
    """Short hash of a file's size, first and last megabyte: enough for a log to tell two checkpoints apart."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(SAMPLE))
        file.seek(max(0, size - SAMPLE))
        digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:12]


def state_fingerprint(state: Mapping[str, Tensor]) -> str:
    """Short hash of every tensor's name, shape and first and last values, for models given as a folder or hub id."""
    digest = hashlib.sha256()
    for key in sorted(state):
        flat = state[key].detach().flatten()
        ends = torch.cat([flat[:8], flat[-8:]]).double().cpu()
        digest.update(f"{key}{tuple(state[key].shape)}".encode() + ends.numpy().tobytes())
    return digest.hexdigest()[:12]


def transformers_version() -> str:
    """The backend's name and version, for version strings."""
    return f"transformers {version('transformers')}"
