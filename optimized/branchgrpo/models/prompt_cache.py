"""Encoded prompts on disk, so that training needs no text encoder."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from branchgrpo.reference.errors import InputError


def cache_key(fingerprint: str, content: str, settings: Mapping[str, object]) -> str:
    """Key of one entry: a hash of the encoders' fingerprint, the content (a prompt, an image's hash) and settings."""
    record = {"fingerprint": fingerprint, "content": content, "settings": dict(sorted(settings.items()))}
    return hashlib.sha256(json.dumps(record, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class PromptCache:
    """A folder with one safetensors file an entry."""

    folder: Path

    def path(self, key: str) -> Path:
        """File of an entry."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def get(self, key: str) -> dict[str, Tensor] | None:
        """The tensors of an entry, or None.

        Raises:
            InputError: a damaged file, by name.
        """
        path = self.path(key)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except SafetensorError as error:
            raise InputError(f"prompt cache {path}", str(error), "an intact safetensors file: delete it") from error

    def put(self, key: str, tensors: Mapping[str, Tensor], content: str) -> None:
        """Write an entry; whole or not at all, also with several writers.

        Raises:
            InputError: a folder that cannot be written.
        """
        path = self.path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".part")
        except OSError as error:
            legal = f"a folder that can be written ({error.strerror})"
            raise InputError("prompt cache", str(self.folder), legal) from error
        os.close(handle)
        try:
            save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, partial, {"content": content})
            os.replace(partial, path)
        finally:
            Path(partial).unlink(missing_ok=True)
