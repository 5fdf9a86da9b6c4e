"""From a method and a setup to calls, arithmetic, memory, and the ratio to flat GRPO."""

import math
from dataclasses import asdict, dataclass

from branchgrpo.reference.counts import Counts, count, count_plan
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.method import Method, tree_plan
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput
from branchgrpo.training.planner.architectures import Architecture, architecture
from branchgrpo.training.planner.network import FLOAT32, Adapters, Network
from branchgrpo.training.planner.setup import BYTES, Setup

ADAM = 2 * FLOAT32
"""Bytes of AdamW's two averages a trained weight."""


@dataclass(frozen=True)
class Velocity:
    """What one velocity of one item costs, guidance included.

    Attributes:
        forward, backward: FLOPs.
        reference: FLOPs of the frozen policy's.
        activations, checkpointed: bytes kept for the backward pass, without and with gradient checkpointing.
    """

    forward: int
    backward: int
    reference: int
    activations: int
    checkpointed: int


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU, by what they hold.

    Attributes:
        weights: of the network, gathered blocks, low-precision copies of autocast and a frozen reference among them.
        gradients: float32.
        optimizer: AdamW's averages, and the moving average of the weights.
        states: of all trees that a GPU holds.
        activations: of one micro-batch.
    """

    weights: int
    gradients: int
    optimizer: int
    states: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())

    def data(self) -> dict[str, int]:
        """As JSON holds it."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class Backbone:
    """A backbone at one size of sample.

    Attributes:
        found: its configuration.
        network: its products.
        adapters: None where all weights are trained.
        elements: D of a state.
        tokens: of the latent.
        text: tokens of a prompt.
        branches: items a velocity: two under classifier-free guidance.
    """

    found: Architecture
    network: Network
    adapters: Adapters | None
    elements: int
    tokens: int
    text: int
    branches: int

    @property
    def parameters(self) -> int:
        """Weights of all experts, adapters apart."""
        return self.network.parameters * self.found.experts

    @property
    def trained(self) -> int:
        """Weights that the optimiser changes."""
        own = self.network.parameters if self.adapters is None else self.network.adapted(self.adapters)
        return own * self.found.experts


def backbone_of(setup: Setup) -> Backbone:
    """The backbone of a setup.

    Raises:
        OptionError, InputError: a backbone, size or target that does not exist.
    """
    found = architecture(setup.backbone)
    latent = found.latent(setup.height, setup.width, setup.frames)
    tokens, text = found.tokens(latent), setup.text_tokens or found.family.text_tokens
    network = found.family.network(found.config, tokens, text)
    adapters = Adapters(setup.rank, setup.targets or found.family.targets) if setup.rank else None
    if adapters is not None and network.adapted(adapters) == 0:
        raise OptionError("lora.targets", adapters.targets, f"the end of a linear layer's name in {found.name}")
    guidance = setup.guidance or found.family.guidance
    return Backbone(found, network, adapters, math.prod(latent), tokens, text, 1 + (guidance == "classifier_free"))


def velocity_of(setup: Setup, backbone: Backbone) -> Velocity:
    """Costs of one velocity."""
    network, adapters, branches = backbone.network, backbone.adapters, backbone.branches
    size = BYTES[setup.dtype]
    plain, again = (
        branches
        * network.activations(
            size, adapters=adapters, autocast=size < FLOAT32 and adapters is None, checkpointing=checkpointing
        )
        for checkpointing in (False, True)
    )
    return Velocity(
        branches * network.forward(adapters),
        branches * network.backward(adapters),
        branches * network.forward(),
        plain,
        again,
    )


def flat_counts(method: Method, counts: Counts) -> Counts:
    """Counts of flat GRPO with the same steps, leaves and leaf output: chains that part from one noise at step 0."""
    plan = method.plan_at(0)
    output = LeafOutput(plan.output)
    flat = tree_plan(
        counts.steps, Kernel(KernelKind.SDE, 0.3), splits=(0,), branching=max(2, counts.leaves), output=output
    )
    return count_plan(flat)


def arithmetic(
    counts: Counts, velocity: Velocity, prompts: int, epochs: int, again: bool, kl: bool
) -> tuple[int, int, int]:
    """FLOPs of one iteration: rollout, forwards and backwards of the update, and the frozen reference."""
    updated = prompts * counts.trained_parents * epochs
    rollout = prompts * counts.denoiser_calls * velocity.forward
    return (
        rollout,
        updated * (velocity.forward * (1 + again) + velocity.backward),
        updated * velocity.reference * kl,
    )


def memory(setup: Setup, backbone: Backbone, velocity: Velocity, counts: Counts, kl: bool, sharded: bool) -> Memory:
    """Bytes on one GPU, weights replicated (DDP) or sharded (FSDP2)."""
    shares = setup.gpus if sharded else 1
    size = BYTES[setup.dtype]
    master = size if backbone.adapters is not None else max(FLOAT32, size)
    held = backbone.parameters * master
    if kl and backbone.adapters is None:
        held += backbone.parameters * master
    if backbone.adapters is not None:
        held += backbone.trained * FLOAT32
    weights = math.ceil(held / shares)
    if sharded and shares > 1:
        weights += 2 * backbone.network.largest_block * master
    if backbone.adapters is None and size < FLOAT32:
        weights += backbone.network.parameters * size
    prompts = setup.all_prompts // setup.gpus
    parents = counts.trained_parents * prompts // setup.accumulation
    micro = min(setup.micro_batch or parents, parents)
    whole = micro < parents or setup.accumulation > 1
    gradients = backbone.trained * FLOAT32
    kept = velocity.checkpointed if setup.gradient_checkpointing else velocity.activations
    return Memory(
        weights,
        gradients if whole else math.ceil(gradients / shares),
        math.ceil(backbone.trained * (ADAM + FLOAT32 * setup.ema) / shares),
        prompts * counts.nodes * backbone.elements * BYTES[setup.storage_dtype],
        micro * kept,
    )


def forecast(method: Method, setup: Setup, iteration: int = 0) -> dict[str, object]:
    """What one iteration of a method costs, as JSON holds it; ``MEANING`` in the command line explains the keys.

    Raises:
        OptionError, InputError: a backbone, size or option that does not fit.
    """
    backbone, counts = backbone_of(setup), count(method, iteration)
    velocity, kl, prompts = velocity_of(setup, backbone), method.objective.kl > 0, setup.all_prompts
    again, epochs = setup.gradient_checkpointing, setup.inner_epochs
    rollout, update, reference = arithmetic(counts, velocity, prompts, epochs, again, kl)
    flat = sum(arithmetic(flat_counts(method, counts), velocity, prompts, epochs, again, False))
    parents = prompts * counts.trained_parents
    return {
        "backbone": backbone.found.name,
        "parameters": backbone.parameters,
        "trained_parameters": backbone.trained,
        "latent_elements": backbone.elements,
        "latent_tokens": backbone.tokens,
        "text_tokens": backbone.text,
        "branches": backbone.branches,
        "prompts": prompts,
        "flops_forward": velocity.forward,
        "flops_backward": velocity.backward,
        "calls_rollout": prompts * counts.denoiser_calls,
        "calls_update": parents * epochs,
        "calls_reference": parents * epochs * kl,
        "flops_rollout": rollout,
        "flops_update": update,
        "flops_reference": reference,
        "flops_iteration": rollout + update + reference,
        "bytes_activations": velocity.activations,
        "bytes_activations_checkpointed": velocity.checkpointed,
        "ddp": memory(setup, backbone, velocity, counts, kl, sharded=False).data(),
        "fsdp2": memory(setup, backbone, velocity, counts, kl, sharded=True).data(),
        "ratio_to_flat": (rollout + update + reference) / flat,
    }
