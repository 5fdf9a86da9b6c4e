"""The planner's options of ``branchgrpo plan``, and the setup that they describe."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from branchgrpo.cli.errors import UsageError
from branchgrpo.cli.parser import Parser, integer_from

if TYPE_CHECKING:
    from branchgrpo.reference.method import Method
    from branchgrpo.training.planner.setup import Setup

PLANNER = """\
planner: with --backbone (or --config) the counts become arithmetic, memory and time.

Arithmetic counts matrix products and attention, 2 FLOPs a multiply-add; a backward pass costs two products for one of
the forward (one where the weight is frozen), four for the two of an attention, and the forward again under gradient
checkpointing. Guidance by two branches doubles everything. Trees keep every state of a GPU's prompts. Weights that are
trained are float32, with AdamW's two averages and a float32 gradient; full training in low precision keeps a
low-precision copy of all weights; adapters keep the frozen weights in --dtype. FSDP2 shards weights, gradients and
averages, gathers two blocks at a time, and holds whole gradients while parts are accumulated. Text encoders, VAE,
reward models, kernels' workspaces and the allocator's slack come on top.
The ratio to flat GRPO is one of FLOPs: every call is taken as equally efficient, and rewards and decoding as free.
JSON: the forecast is the key "planner" of each result; its keys are the rows of the table, values in FLOPs and bytes.
"""


def add_options(made: Parser) -> None:
    """Add the planner's options; None where one was not given."""
    group = made.add_argument_group("planner", PLANNER.partition("\n")[0].removeprefix("planner: "))
    group.add_argument(
        "--backbone",
        metavar="NAME",
        help="flux.1-dev, sd3-medium, sd3.5-medium, sd3.5-large, qwen-image, wan2.1-1.3b, wan2.1-14b, digits, "
        "tiny-flux …, or the folder of a diffusers pipeline",
    )
    group.add_argument(
        "--config", metavar="FILE", type=Path, help="a run's TOML file in place of the options; --gpus may be added"
    )
    group.add_argument("--height", metavar="H", type=integer_from(1), help="pixels (default: 720)")
    group.add_argument("--width", metavar="W", type=integer_from(1), help="pixels (default: 720)")
    group.add_argument("--frames", metavar="F", type=integer_from(1), help="of a video (default: 1)")
    group.add_argument("--gpus", metavar="N", type=integer_from(1), help="processes, one a GPU (default: 1)")
    group.add_argument(
        "--prompts", metavar="P", type=integer_from(1), help="an iteration, over all GPUs (default: one a GPU and part)"
    )
    group.add_argument("--dtype", metavar="NAME", help="of the network's arithmetic (default: bfloat16)")
    group.add_argument("--storage-dtype", metavar="NAME", help="of kept states (default: float32)")
    trained = group.add_mutually_exclusive_group()
    trained.add_argument("--lora", metavar="RANK", type=integer_from(1), help="train adapters of this rank")
    trained.add_argument("--full", action="store_true", help="train all weights (default)")
    group.add_argument(
        "--accumulation", metavar="N", type=integer_from(1), help="parts of a GPU's prompts (default: 1)"
    )
    group.add_argument(
        "--micro-batch", metavar="N", type=integer_from(0), help="parents a backward; 0: all of a part (default: 1)"
    )
    group.add_argument("--inner-epochs", metavar="N", type=integer_from(1), help="updates a rollout (default: 1)")
    group.add_argument("--gradient-checkpointing", action="store_true", help="compute activations again")
    group.add_argument("--guidance", metavar="KIND", help="none, embedded or classifier_free (default: the model's)")
    group.add_argument(
        "--text-tokens", metavar="N", type=integer_from(1), help="of a prompt (default: as the pipeline pads)"
    )


PASSED_ON = (
    "height", "width", "frames", "gpus", "prompts", "dtype", "storage_dtype", "accumulation", "micro_batch",
    "inner_epochs", "guidance", "text_tokens",
)  # fmt: skip


def given(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """The options of these names that were given, as they are typed."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) not in (None, False)]


def setup_of(args: argparse.Namespace) -> "tuple[Setup | None, Method | None]":
    """The setup that the arguments describe, and the method where a configuration names it.

    Raises:
        UsageError: options of the planner without a backbone, or beside a configuration.
        OptionError, InputError: an option or configuration that is not legal.
    """
    own = (*PASSED_ON, "lora", "full", "gradient_checkpointing")
    if args.config is not None:
        beside = given(args, ("preset", "backbone", *(name for name in own if name != "gpus")))
        if beside:
            raise UsageError(f"{beside[0]} beside --config: the file says it (see branchgrpo plan --help)")
        from branchgrpo.training.config.method import build_method
        from branchgrpo.training.config.reading import read_config
        from branchgrpo.training.planner.setup import setup_from

        config = read_config(args.config)
        return setup_from(config, args.gpus or 1), build_method(config.method)
    if args.backbone is None:
        alone = given(args, own)
        if alone:
            raise UsageError(f"{alone[0]} needs --backbone NAME (see branchgrpo plan --help)")
        return None, None
    from branchgrpo.training.planner.setup import Setup

    values = {name: getattr(args, name) for name in PASSED_ON if getattr(args, name) is not None}
    made = Setup(args.backbone, gradient_checkpointing=args.gradient_checkpointing, **values)
    return (replace(made, rank=args.lora) if args.lora else made), None
