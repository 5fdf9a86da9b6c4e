"""Weights & Biases, for those who have it; ``offline`` needs no network, ``wandb sync`` sends it later."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from branchgrpo.reference.errors import OptionError

FOLDER = "wandb"
PRIVATE = ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR")
"""Where the client would write outside the run's folder, unless its user has said where."""


def require_wandb(mode: str) -> None:
    """Raise ``OptionError`` unless the client is installed."""
    import importlib.util

    if importlib.util.find_spec("wandb") is None:
        raise OptionError("logging.wandb", mode, "off, or the client installed: pip install wandb")


class WeightsAndBiases:
    """Numbers, and sample grids as images, by iteration; a resumed run goes on under its id."""

    def __init__(self, folder: Path, *, project: str, mode: str, config: Mapping[str, Any], start: int = 0) -> None:
        """Begin, or go on with, the run whose id is in ``folder/wandb/run-id``.

        Args:
            folder: of the run; the client writes nothing elsewhere.
            project: its project.
            mode: ``offline`` or ``online``.
            config: the run's resolved configuration.
            start: the first iteration to come.

        Raises:
            OptionError: the client is not installed.
        """
        require_wandb(mode)
        from importlib import import_module

        own = folder / FOLDER
        own.mkdir(parents=True, exist_ok=True)
        for name in PRIVATE:
            os.environ.setdefault(name, str(own / name.split("_")[1].lower()))
        mark = own / "run-id"
        identity = mark.read_text(encoding="utf-8") if mark.exists() and start else None
        module: Any = import_module("wandb")
        self.module = module
        self.run = module.init(
            project=project,
            name=folder.name,
            id=identity,
            resume="allow" if identity else None,
            dir=str(folder),
            mode=mode,
            config=dict(config),
        )
        mark.write_text(str(self.run.id), encoding="utf-8")

    def numbers(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log scalars."""
        self.run.log(dict(metrics), step=iteration)

    def grid(self, iteration: int, path: Path) -> None:
        """Log a sample grid."""
        self.run.log({"samples": self.module.Image(str(path))}, step=iteration)

    def close(self) -> None:
        """Write everything and end."""
        self.run.finish()
