"""The policy as the rollout and the update call it: autocast, DDP, FSDP2, and the frozen reference."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.protocols import Condition, VelocityModel
from branchgrpo.training.engine.distributed import Cluster
from branchgrpo.training.engine.optimizer import Named
from branchgrpo.training.engine.reference_policy import reference_policy
from branchgrpo.training.engine.task import Task


class Autocast:
    """A velocity model whose arithmetic is in a lower precision than its weights.

    Rollout, update and reference go through it alike, so the ratio on policy stays 1.
    """

    def __init__(self, model: Any, guidance: Any, device: torch.device, dtype: torch.dtype | None) -> None:
        self.model, self.guidance, self.device, self.dtype = model, guidance, device, dtype

    def __call__(
        self, x: Float[Tensor, "items *latent"], sigma: Float[Tensor, "items"], condition: Condition
    ) -> Float[Tensor, "items *latent"]:
        """Velocity of every item."""
        if self.dtype is None:
            velocity: Tensor = self.model(x, sigma, condition)
            return velocity
        with torch.autocast(self.device.type, self.dtype):
            velocity = self.model(x, sigma, condition)
        return velocity


@dataclass(frozen=True, eq=False)
class Policies:
    """The trained policy in its roles.

    Attributes:
        rollout: without gradients, and for evaluations.
        update: through the wrapper that averages gradients over processes.
        reference: frozen; None where the objective has no KL term.
        no_sync: context in which gradients are not averaged yet.
        weights: what the optimiser changes, by name.
    """

    rollout: VelocityModel
    update: VelocityModel
    reference: VelocityModel | None
    no_sync: Callable[[], AbstractContextManager[Any]]
    weights: Named


def shard(network: nn.Module, cluster: Cluster) -> None:
    """FSDP2: every block of the network on its own, and the rest with the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Nothing changes a velocity in place, which is all that the warning is about.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(cluster.device.type, (cluster.size,))
    for block in list(blocks_of(network)):
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost module lists: what a network repeats; lists inside of them stay whole."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from blocks_of(child)


@contextmanager
def unsynchronised(network: Any) -> Iterator[None]:
    """Context in which FSDP2 keeps gradients whole, to be averaged by a later backward."""
    network.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        network.set_requires_gradient_sync(True)


def check_parallel(task: Task, cluster: Cluster) -> None:
    """Raise ``OptionError`` where a network cannot be sharded."""
    if cluster.fsdp and task.experts > 1:
        legal = "ddp for a model of two experts: ranks that need different ones would wait for each other"
        raise OptionError("run.parallel", "fsdp2", legal)


def named_weights(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


def build_policies(task: Task, cluster: Cluster, kl: bool) -> Policies:
    """Wrap the network for the run's processes; DDP gives every rank the weights of rank 0.

    Args:
        task: the network, not wrapped yet.
        cluster: the processes.
        kl: whether the objective needs the reference policy.

    Raises:
        OptionError: a network that cannot be sharded.
    """
    check_parallel(task, cluster)
    network: Any = task.network
    fixed = reference_policy(network, task.lora) if kl else None
    trained: Any = network
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    if cluster.fsdp:
        for module in (network, getattr(fixed, "network", None)):
            if module is not None:
                shard(module, cluster)
        no_sync = lambda: unsynchronised(network)  # noqa: E731
    elif cluster.size > 1:
        trained = nn.parallel.DistributedDataParallel(
            network,
            device_ids=[cluster.device] if cluster.device.type == "cuda" else None,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=task.unused,
        )
        no_sync = trained.no_sync

    def cast(model: Any) -> VelocityModel:
        return Autocast(model, network.guidance, cluster.device, task.autocast)

    reference = None if fixed is None else cast(fixed)
    return Policies(cast(network), cast(trained), reference, no_sync, named_weights(network))
