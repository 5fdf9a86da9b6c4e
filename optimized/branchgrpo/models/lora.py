"""Low-rank adapters: attach, train nothing else, switch off for the reference policy, save with their metadata."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from branchgrpo.reference.errors import InputError, OptionError, is_integer

ADAPTER = "default"
WEIGHTS = "pytorch_lora_weights.safetensors"
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
JOINT_ATTENTION = (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


@dataclass(frozen=True)
class LoraOptions:
    """A low-rank adapter on some linear layers.

    There is no dropout: a velocity that changes from call to call would move the ratio on policy off 1.

    Attributes:
        rank: r ≥ 1.
        alpha: the update is scaled by alpha / rank; ≥ 1.
        targets: ends of the names of the adapted layers; None is the family's attention projections.
    """

    rank: int = 32
    alpha: int = 64
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, value in (("rank", self.rank), ("alpha", self.alpha)):
            if not is_integer(value) or value < 1:
                raise OptionError(f"lora.{name}", value, "an integer ≥ 1")


def full_precision(module: nn.Module) -> None:
    """Keep trained parameters in float32 at least: a bf16 weight swallows small updates."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()


def attach(transformer: Any, options: LoraOptions, targets: tuple[str, ...], unread: str | None) -> None:
    """Freeze a transformer and add a trainable adapter that starts as the identity.

    Args:
        transformer: the network.
        options: rank, alpha and targets.
        targets: the targets where the options name none.
        unread: pattern of layers whose output nothing reads; an adapter there would never get a gradient.

    Raises:
        OptionError: a target that names no linear layer.
    """
    from peft import LoraConfig

    chosen = options.targets or targets
    names = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    for target in chosen:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise OptionError("lora.targets", target, f"the end of a linear layer's name, such as {names[:6]}")
    transformer.requires_grad_(False)
    config = LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=list(chosen), exclude_modules=unread)
    transformer.add_adapter(config, ADAPTER)
    full_precision(transformer)


def attached(transformer: Any) -> bool:
    """Whether a transformer carries the adapter."""
    return ADAPTER in getattr(transformer, "peft_config", {})


@contextmanager
def adapters_off(transformers: Mapping[str, Any]) -> Iterator[None]:
    """The reference policy: the weights without their adapters, exactly.

    Raises:
        OptionError: nothing to switch off.
    """
    for name, transformer in transformers.items():
        if not attached(transformer):
            raise OptionError(f"{name}.lora", None, "attached: without it the reference policy needs its own weights")
    try:
        for transformer in transformers.values():
            transformer.disable_adapters()
        yield
    finally:
        for transformer in transformers.values():
            transformer.enable_adapters()


def save(transformer: Any, pipeline_class: Any, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapter as the pipeline's own ``load_lora_weights`` reads it, rank and alpha included.

    Args:
        transformer: with the adapter.
        pipeline_class: knows the format.
        folder: to write to.
        state: weights in place of the present ones, by the transformer's names (averages, gathered shards).

    Raises:
        OptionError: no adapter to save.
    """
    from peft.utils import get_peft_model_state_dict

    if not attached(transformer):
        raise OptionError("lora", None, "attached before it is saved")
    config = transformer.peft_config[ADAPTER].to_dict()
    metadata = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    pipeline_class.save_lora_weights(
        folder,
        transformer_lora_layers=get_peft_model_state_dict(
            transformer, state_dict=None if state is None else dict(state), adapter_name=ADAPTER
        ),
        transformer_lora_adapter_metadata=metadata,
    )


def load(transformer: Any, pipeline_class: Any, folder: Path) -> None:
    """Put a saved adapter in place of the present one; only it is trainable afterwards.

    Raises:
        InputError: no adapter in the folder, or one without the metadata that holds rank and alpha.
    """
    if not (folder / WEIGHTS).is_file():
        raise InputError("lora folder", str(folder), f"a folder with {WEIGHTS}")
    state, metadata = pipeline_class.lora_state_dict(folder, return_lora_metadata=True, local_files_only=True)
    if not metadata:
        raise InputError(f"{folder}/{WEIGHTS}: metadata", metadata, "the adapter's configuration (rank and alpha)")
    if attached(transformer):
        transformer.delete_adapters(ADAPTER)
    transformer.requires_grad_(False)
    transformer.load_lora_adapter(state, prefix="transformer", metadata=metadata, adapter_name=ADAPTER)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(f".{ADAPTER}." in name and "lora_" in name)
    full_precision(transformer)
