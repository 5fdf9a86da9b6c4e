"""Choosing the backbone by the class of the pipeline."""

import importlib
import pkgutil
from pathlib import Path

import torch

from branchgrpo.models.backbone import REGISTRY, Backbone
from branchgrpo.models.folder import PipelineFolder
from branchgrpo.models.lora import LoraOptions
from branchgrpo.models.options import LoadOptions
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Guidance


def import_backbones() -> None:
    """Import every file of ``branchgrpo.models.backbones``, which registers its classes."""
    package = importlib.import_module("branchgrpo.models.backbones")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def load_backbone(
    source: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    guidance: Guidance | None = None,
    lora: LoraOptions | None = None,
    options: LoadOptions | None = None,
) -> Backbone:
    """Load the backbone of a pipeline folder or hub id; the arguments are those of ``Backbone.from_pretrained``.

    Raises:
        InputError: a wrong folder, or a pipeline class that no backbone serves.
    """
    import_backbones()
    folder = PipelineFolder.resolve(source)
    if folder.class_name not in REGISTRY:
        raise InputError(f"{source}: pipeline", folder.class_name, f"one of {sorted(REGISTRY)}")
    backbone = REGISTRY[folder.class_name]
    return backbone.from_pretrained(
        folder.path, dtype=dtype, device=device, guidance=guidance, lora=lora, options=options
    )
