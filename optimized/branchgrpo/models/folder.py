"""The folder of a diffusers pipeline: found, checked and fingerprinted before anything is loaded from it."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from branchgrpo.reference.errors import InputError

INDEX = "model_index.json"
BLOB = re.compile(r"[0-9a-f]{64}")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def download(hub_id: str) -> Path:
    """The local snapshot of a hub repository; with ``HF_HUB_OFFLINE=1`` only what is cached already.

    Raises:
        InputError: the hub has no such pipeline, or cannot be reached.
    """
    from diffusers import DiffusionPipeline

    try:
        return Path(DiffusionPipeline.download(hub_id))
    except (OSError, ValueError) as error:
        legal = f"a folder with {INDEX}, or a hub id that can be downloaded ({error})"
        raise InputError("source", hub_id, legal) from error


def content_digest(file: Path) -> bytes:
    """SHA-256 of a file; a large file in the hub's cache is named by it, and is not read."""
    blob = file.resolve()
    if blob.parent.name == "blobs" and BLOB.fullmatch(blob.name):
        return bytes.fromhex(blob.name)
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


@dataclass(frozen=True)
class PipelineFolder:
    """A local pipeline folder and its index.

    Attributes:
        path: the folder that holds ``model_index.json`` and one sub-folder a component.
        index: the parsed index: ``name → [library, class]`` a component, and the pipeline's own settings.
    """

    path: Path
    index: Mapping[str, Any]

    @classmethod
    def resolve(cls, source: str | Path) -> Self:
        """Open a local folder, or download a hub id first; a local folder never reaches for the network.

        Args:
            source: a path, or ``owner/name``.

        Raises:
            InputError: neither a pipeline folder nor a hub id.
        """
        path = Path(source).expanduser()
        if not path.exists():
            if not isinstance(source, str) or not HUB_ID.fullmatch(source):
                raise InputError("source", str(source), "an existing folder, or a hub id 'owner/name'")
            path = download(source)
        if not (path / INDEX).is_file():
            found = sorted(p.name for p in path.iterdir())[:8] if path.is_dir() else "a file"
            raise InputError("source", str(source), f"a pipeline folder with {INDEX}; found {found}")
        try:
            index = json.loads((path / INDEX).read_text())
        except ValueError as error:
            raise InputError(f"{source}/{INDEX}", str(error), "valid JSON") from error
        if not isinstance(index, dict) or "_class_name" not in index:
            raise InputError(f"{source}/{INDEX}", index, "an object with the pipeline's _class_name")
        return cls(path, index)

    @property
    def class_name(self) -> str:
        """Class of the pipeline."""
        return str(self.index["_class_name"])

    def has(self, name: str) -> bool:
        """Whether the index lists a component that is not null."""
        entry = self.index.get(name)
        return isinstance(entry, list) and len(entry) == 2 and entry[1] is not None

    def component_class(self, name: str) -> str:
        """Class name of a component, as the index lists it.

        Raises:
            InputError: the index does not list it.
        """
        if not self.has(name):
            listed = sorted(key for key in self.index if self.has(key))
            raise InputError(f"{INDEX}: {name}", self.index.get(name), f"a component; {self.path} lists {listed}")
        return str(self.index[name][1])

    def component(self, name: str) -> Path:
        """Folder of a component that the index lists.

        Raises:
            InputError: not listed, or listed but absent.
        """
        kind, folder = self.component_class(name), self.path / name
        if not folder.is_dir() or not any(folder.iterdir()):
            raise InputError(f"component {name}", "missing", f"a folder {folder} with the files of {kind}")
        return folder

    def config(self, name: str) -> dict[str, Any]:
        """The JSON configuration of a component, read without loading it.

        Raises:
            InputError: no configuration file.
        """
        folder = self.component(name)
        for file in ("config.json", "scheduler_config.json"):
            if (folder / file).is_file():
                return dict(json.loads((folder / file).read_text()))
        raise InputError(f"component {name}", sorted(p.name for p in folder.iterdir()), "with a config.json")

    def fingerprint(self, names: Iterable[str]) -> str:
        """SHA-256 over the names and contents of every file of the components, in a fixed order."""
        digest = hashlib.sha256()
        for name in sorted(names):
            folder = self.component(name)
            for file in sorted(p for p in folder.rglob("*") if p.is_file()):
                digest.update(f"{name}/{file.relative_to(folder).as_posix()}\0".encode())
                digest.update(content_digest(file))
        return digest.hexdigest()
