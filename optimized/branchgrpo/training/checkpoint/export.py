"""The trained model in the form in which others load it: a pipeline folder, an adapter, or the digits network."""

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from branchgrpo.models.backbone import Backbone, with_prefix
from branchgrpo.models.digits import DigitsConfig, DigitsVelocity
from branchgrpo.models.folder import INDEX, PipelineFolder
from branchgrpo.models.lora import attached
from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Guidance
from branchgrpo.training.checkpoint.errors import CheckpointError
from branchgrpo.training.checkpoint.tensors import collect, trained_state

DIGITS_WEIGHTS = "digits.safetensors"
DIGITS_CONFIG = "config.json"
LINKED = 1 << 20
"""Bytes from which a file that stays the same is linked and not copied; small ones might be edited in place."""


def export(network: nn.Module, folder: Path, ema: Mapping[str, Tensor] | None = None, main: bool = True) -> None:
    """Write the trained model; with FSDP2 a collective that every rank calls. The network itself is left alone.

    An adapter becomes ``pytorch_lora_weights.safetensors`` with its rank and alpha, for ``load_lora_weights``; trained
    weights become a whole pipeline folder for ``from_pretrained``, in the dtype in which they were trained, whose other
    components are linked to the source's files where the disk allows, and copied elsewhere; the digits become a
    safetensors file and their configuration, for ``load_digits``.

    Args:
        network: a backbone or the digits network; no wrapper of it (FSDP2 shards in place and is none).
        folder: to write; a former export there is replaced once the new one is complete.
        ema: averaged weights by name, in place of the trained ones.
        main: whether this rank writes (rank 0).

    Raises:
        InputError: another kind of network, or averages of other weights.
        CheckpointError: a folder that cannot be written; a former export is untouched.
    """
    if not isinstance(network, Backbone | DigitsVelocity):
        raise InputError("network", type(network).__name__, "a backbone or the digits network")
    present = trained_state(network)
    if ema is not None and not ema.keys() <= present.keys():
        raise InputError("ema", sorted(ema.keys() - present.keys())[:3], "averages of weights that were trained")
    state = collect(present.items(), main)
    state |= {name: mean.to(present[name].dtype) for name, mean in collect((ema or {}).items(), main).items()}
    if not main:
        return
    temporary = folder.with_name(f".writing-{folder.name}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        if isinstance(network, DigitsVelocity):
            write_digits(network, state, temporary)
        elif all(attached(expert) for expert in network.experts.values()):
            network.save_lora(temporary, state)
        else:
            write_pipeline(network, state, temporary)
        put_in_place(temporary, folder)
    except (OSError, SafetensorError) as error:
        legal = "writable, on a disk with room; checkpoints and a former export are untouched"
        raise CheckpointError(f"export folder {folder}", str(error), legal) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(temporary: Path, folder: Path) -> None:
    """Give a complete folder its name, in place of a former one."""
    if not folder.exists():
        temporary.rename(folder)
        return
    former = folder.with_name(f".removing-{folder.name}-{secrets.token_hex(4)}")
    folder.rename(former)
    temporary.rename(folder)
    shutil.rmtree(former)


def write_digits(network: DigitsVelocity, state: Mapping[str, Tensor], folder: Path) -> None:
    """The digits network: its weights, its size, its guidance."""
    save_file(dict(state), folder / DIGITS_WEIGHTS)
    content = {"network": asdict(network.config), "guidance": asdict(network.guidance)}
    (folder / DIGITS_CONFIG).write_text(json.dumps(content, indent=1))


def load_digits(folder: Path) -> DigitsVelocity:
    """Read what ``write_digits`` wrote.

    Raises:
        InputError: no export of the digits network.
    """
    try:
        content = json.loads((folder / DIGITS_CONFIG).read_text())
        state = load_file(folder / DIGITS_WEIGHTS)
        network = DigitsVelocity(DigitsConfig(**content["network"]), Guidance(**content["guidance"]))
        network = network.to(next(iter(state.values())).dtype)
        network.load_state_dict(state)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise InputError("folder", str(folder), f"an export of the digits network ({error})") from error
    return network.eval()


def write_pipeline(network: Backbone, state: Mapping[str, Tensor], folder: Path) -> None:
    """A pipeline folder: trained transformers anew, everything else as it was."""
    source = network.folder
    shutil.copyfile(source.path / INDEX, folder / INDEX)
    for name in source.index:
        if source.has(name) and name not in network.experts:
            bring(source, name, folder / name)
    for name, expert in network.experts.items():
        with torch.device("meta"):
            shell = type(expert).from_config(expert.config)
        shell.load_state_dict(with_prefix(state, name + "."), assign=True)
        shell.save_pretrained(folder / name)


def bring(source: PipelineFolder, name: str, target: Path) -> None:
    """A component that did not change: large files linked where both folders share a disk, others copied."""
    component = source.component(name)
    for file in sorted(path for path in component.rglob("*") if path.is_file()):
        place = target / file.relative_to(component)
        place.parent.mkdir(parents=True, exist_ok=True)
        content = file.resolve()  # the hub's cache holds links to its blobs
        if content.stat().st_size >= LINKED:
            try:
                os.link(content, place)
                continue
            except OSError:
                pass  # another disk, or one without links
        shutil.copyfile(content, place)
