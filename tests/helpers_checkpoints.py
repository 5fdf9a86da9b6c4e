"""A small network, optimisers of every kind, and checkpoints of them."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from branchgrpo.training.checkpoint.state import TrainState, capture
from branchgrpo.training.checkpoint.write import save

CONFIG = '[run]\nseed = 3\niterations = 20\n\n[[rewards]]\nname = "digits"\nweight = 1.0\n'


class Tied(nn.Module):
    """Two names for one matrix, a scalar, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("offset", torch.linspace(-1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.second(torch.tanh(self.first(x) + self.offset))


class Quantised(Optimizer):
    """Stands in for an 8-bit optimiser: bytes, lookup tables and a plain integer, some of them one level down."""

    def __init__(self, params: object, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    def load_state_dict(self, state_dict: dict) -> None:
        """Bytes stay bytes: the base class would turn them into the parameter's dtype."""
        params = [p for group in self.param_groups for p in group["params"]]
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.state.update({params[i]: entries for i, entries in state_dict["state"].items()})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    table = torch.linspace(-1, 1, 256)
                    state.update(step=0, state1=torch.full_like(p, 127, dtype=torch.uint8), quant={"qmap": table})
                    state["quant"]["absmax"] = torch.ones(1)
                state["step"] += 1
                quant = state["quant"]
                mean = 0.9 * quant["qmap"][state["state1"].long()] * quant["absmax"] + 0.1 * p.grad
                quant["absmax"] = mean.abs().max().clamp(min=1e-9)[None]
                scaled = (mean / quant["absmax"]).contiguous()
                state["state1"] = torch.bucketize(scaled, quant["qmap"]).clamp(max=255).to(torch.uint8)
                p.sub_(group["lr"] / state["step"] * mean.reshape(p.shape))


def grouped(network: nn.Module, reverse: bool = False) -> list[dict]:
    """Matrices and the rest, in two groups."""
    params = [p for p in network.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return groups[::-1] if reverse else groups


def adamw(network: nn.Module, reverse: bool = False, **options: object) -> Optimizer:
    return torch.optim.AdamW(grouped(network, reverse), lr=0.02, **options)


def network(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def train(net: nn.Module, optimizer: Optimizer, start: int, stop: int) -> None:
    for i in range(start, stop):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (1 + i)
        optimizer.step()


def state_of(
    net: nn.Module, optimizer: Optimizer, iteration: int, ema: Mapping[str, Tensor] | None = None, **more: object
) -> TrainState:
    taken = capture(net, optimizer, ema)
    facts = {"seed": 3, "optimizer_steps": iteration, "world_size": 1, "config": CONFIG, "config_hash": "abc", **more}
    return TrainState(iteration=iteration, weights=taken.weights, optimizer=taken.optimizer, ema=taken.ema, **facts)


def trained_state_at(iteration: int) -> TrainState:
    net = network()
    optimizer = adamw(net)
    train(net, optimizer, 0, iteration)
    return state_of(net, optimizer, iteration, {name: p.detach() / 2 for name, p in net.named_parameters()})


def two_checkpoints(run_folder: Path) -> tuple[Path, Path]:
    """An older one and a newer one."""
    return save(run_folder, trained_state_at(2)), save(run_folder, trained_state_at(4))


def all_equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@contextlib.contextmanager
def no_pickles() -> Iterator[None]:
    """Every attempt to read or write a pickle raises."""
    import pickle

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("touched a pickle")

    names = ("load", "loads", "dump", "dumps", "Unpickler", "Pickler")
    kept = {name: getattr(pickle, name) for name in names}
    torch_kept = torch.load, torch.save
    try:
        for name in names:
            setattr(pickle, name, refuse)
        torch.load, torch.save = refuse, refuse
        yield
    finally:
        for name, value in kept.items():
            setattr(pickle, name, value)
        torch.load, torch.save = torch_kept
