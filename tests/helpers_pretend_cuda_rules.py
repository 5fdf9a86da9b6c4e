"""Tests of the pretended device itself; ``test_conformance_pretend_cuda.py`` runs them in a process that has it."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers_pretend_cuda import CUDA, NO_COMPILER
from torch import Tensor, nn

OTHER = "same device"
AT = "indices should be either on cpu or on the same device as the indexed tensor"


def here() -> Tensor:
    return torch.arange(1.0, 4.0)


def there() -> Tensor:
    return torch.arange(1.0, 4.0, device="cuda")


def index(device: str = "cpu") -> Tensor:
    return torch.tensor([2, 0], device=device)


def sets(x: Tensor, at: Any, value: Any) -> Tensor:
    x[at] = value
    return x


def increased(x: Tensor, by: Tensor) -> Tensor:
    x += by
    return x


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "sum": (lambda: there() + here(), RuntimeError, OTHER),
    "product of matrices": (lambda: there() @ here(), RuntimeError, OTHER),
    "in place": (lambda: increased(there(), here()), RuntimeError, OTHER),
    "in place on the CPU": (lambda: increased(here(), there()), RuntimeError, OTHER),
    "a CPU scalar grows": (lambda: increased(torch.zeros(()), there().sum()), RuntimeError, OTHER),
    "out": (lambda: torch.add(there(), there(), out=here()), RuntimeError, OTHER),
    "cat": (lambda: torch.cat([there(), here()]), RuntimeError, OTHER),
    "stack with a scalar": (lambda: torch.stack([there().sum(), torch.zeros(())]), RuntimeError, OTHER),
    "where": (lambda: torch.where(there() > 1, there(), here()), RuntimeError, OTHER),
    "condition of where": (lambda: torch.where(here() > 1, there(), there()), RuntimeError, OTHER),
    "mask of masked_fill": (lambda: there().masked_fill(here() > 1, 0.0), RuntimeError, OTHER),
    "index on the device": (lambda: here()[index("cuda")], RuntimeError, AT),
    "mask on the device": (lambda: here()[there() > 1], RuntimeError, AT),
    "values of an assignment": (lambda: sets(there(), index(), torch.zeros(2)), RuntimeError, OTHER),
    "index_select": (lambda: there().index_select(0, index()), RuntimeError, OTHER),
    "gather": (lambda: there().gather(0, index()), RuntimeError, OTHER),
    "scatter": (lambda: there().scatter(0, index(), there()[:2]), RuntimeError, OTHER),
    "index_add_": (lambda: there().index_add_(0, index(), there()[:2]), RuntimeError, OTHER),
    "searchsorted": (lambda: torch.searchsorted(there(), here()), RuntimeError, OTHER),
    "repeat_interleave": (lambda: there().repeat_interleave(torch.tensor([1, 2, 0])), RuntimeError, OTHER),
    "embedding": (lambda: nn.functional.embedding(index(), there()[:, None]), RuntimeError, OTHER),
    "equal": (lambda: torch.equal(there(), here()), RuntimeError, OTHER),
    "linear": (lambda: nn.Linear(3, 2).cuda()(here()), RuntimeError, OTHER),
    "loss": (lambda: nn.functional.mse_loss(there(), here()), RuntimeError, OTHER),
    "numpy": (lambda: there().numpy(), TypeError, "can't convert cuda:0 device type tensor to numpy"),
    "asarray": (lambda: np.asarray(there()), TypeError, "can't convert cuda:0 device type tensor to numpy"),
    "generator": (lambda: torch.randn(2, device="cuda", generator=torch.Generator()), RuntimeError, "generator"),
    "generator in place": (lambda: there().normal_(generator=torch.Generator()), RuntimeError, "generator"),
    "pinned": (lambda: torch.empty(2, device="cuda", pin_memory=True), RuntimeError, "pinned"),
    "another device": (lambda: torch.zeros(2, device="cuda:1"), RuntimeError, "invalid device"),
    "moved to another device": (lambda: here().to("cuda:1"), RuntimeError, "invalid device"),
    "compile": (lambda: torch.compile(here)(), torch._dynamo.exc.TorchDynamoException, NO_COMPILER),
}

ON_DEVICE: dict[str, tuple[Callable[[], Tensor], list[Any]]] = {
    "tensor": (lambda: torch.tensor([1.0, 2.0], device=CUDA), [1, 2]),
    "full": (lambda: torch.full((2,), 3.0, device="cuda"), [3, 3]),
    "like": (lambda: torch.zeros_like(there()), [0, 0, 0]),
    "to": (lambda: here().to("cuda", torch.float64, non_blocking=True), [1, 2, 3]),
    "to of another": (lambda: here().to(there()), [1, 2, 3]),
    "cuda": (lambda: here().cuda(), [1, 2, 3]),
    "number": (lambda: 2 * there(), [2, 4, 6]),
    "scalar of the CPU": (lambda: there() * torch.tensor(2.0), [2, 4, 6]),
    "scalar of the device": (lambda: torch.tensor(2.0) - there().sum(), -4),
    "where with a scalar": (lambda: torch.where(there() > 1, there(), torch.tensor(0.0)), [0, 2, 3]),
    "masked_fill with a scalar": (lambda: there().masked_fill(there() > 1, torch.tensor(0.0)), [1, 0, 0]),
    "index of the CPU": (lambda: there()[index()], [3, 1]),
    "index of the device": (lambda: there()[index("cuda")], [3, 1]),
    "mask of the CPU": (lambda: there()[here() > 1], [2, 3]),
    "assignment of a scalar": (lambda: sets(there(), index(), torch.tensor(7.0)), [7, 2, 7]),
    "assignment to a slice": (lambda: sets(there(), slice(2), here()[:2] * 5), [5, 10, 3]),
    "assignment by a mask": (lambda: sets(there(), there() > 1, 0.0), [1, 0, 0]),
    "in place": (lambda: increased(there(), there()), [2, 4, 6]),
    "view": (lambda: there().reshape(3, 1)[1:].flatten(), [2, 3]),
    "copy_ from the CPU": (lambda: there().copy_(here() + 1), [2, 3, 4]),
    "data": (lambda: nn.Parameter(there()).data, [1, 2, 3]),
    "deepcopy": (lambda: copy.deepcopy(there()), [1, 2, 3]),
}

ON_CPU: dict[str, tuple[Callable[[], Tensor], list[Any]]] = {
    "cpu": (lambda: there().cpu(), [1, 2, 3]),
    "to": (lambda: there().to("cpu", torch.int64), [1, 2, 3]),
    "copy_ from the device": (lambda: torch.zeros(3).copy_(there()), [1, 2, 3]),
    "numpy of a copy": (lambda: torch.from_numpy(there().cpu().numpy()), [1, 2, 3]),
    "without a device": (lambda: torch.zeros(2), [0, 0]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name: str) -> None:
    action, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        action()


@pytest.mark.parametrize(("name", "place"), [*((n, "cuda:0") for n in ON_DEVICE), *((n, "cpu") for n in ON_CPU)])
def test_what_torch_allows_is_where_torch_puts_it(name: str, place: str) -> None:
    action, expected = (ON_CPU if place == "cpu" else ON_DEVICE)[name]
    found = action()
    assert str(found.device) == place
    assert found.is_cuda == (place != "cpu")
    assert found.type().startswith("torch.cuda." if found.is_cuda else "torch.")
    assert found.get_device() == (0 if found.is_cuda else -1)
    assert found.tolist() == expected


def test_a_move_is_a_copy_and_a_view_is_none() -> None:
    x, y = here(), there()
    x.cuda().zero_()
    y.cpu().zero_()
    assert x.tolist() == y.tolist() == [1.0, 2.0, 3.0]
    assert y.cuda() is y
    y[1:].zero_()
    assert y.tolist() == [1.0, 0.0, 0.0]


def test_gradients_are_where_their_tensors_are() -> None:
    leaf, scale = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, device="cuda", requires_grad=True)
    (leaf.cuda() * scale * there()).sum().cpu().backward()
    assert (str(leaf.grad.device), leaf.grad.tolist()) == ("cpu", [2.0, 4.0, 6.0])
    assert (str(scale.grad.device), scale.grad.tolist()) == ("cuda:0", [1.0, 2.0, 3.0])


class Mixing(torch.autograd.Function):
    """A backward with a tensor of the CPU in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.full((3,), 2.0)


def test_a_mix_in_a_backward_is_refused_and_unused_outputs_are_not() -> None:
    x = there().requires_grad_()
    with pytest.raises(RuntimeError, match=OTHER):
        Mixing.apply(x).sum().backward()
    first, _, _ = x.split(1)  # autograd makes zeros for the others, and joins them
    first.sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 0.0]


def test_modules_move_and_learn_where_they_are() -> None:
    module = nn.Linear(3, 1)
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    plain = copy.deepcopy(module)
    module.to("cuda")
    assert all(new is old for new, old in zip(module.parameters(), parameters, strict=True))
    assert {str(p.device) for p in module.parameters()} == {"cuda:0"}
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in copy.deepcopy(module).parameters())
    module(there()).sum().backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    plain(here()).sum().backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    other.step()
    assert torch.equal(module.weight.cpu(), plain.weight)


def test_a_copy_in_flight_is_not_read_before_somebody_waits() -> None:
    pinned = torch.empty(3, pin_memory=True)
    pinned.copy_(there(), non_blocking=True)
    with pytest.raises(RuntimeError, match="still writing"):
        pinned + 1
    assert pinned[1:].to("cuda", non_blocking=True).tolist() == [2.0, 3.0]  # on the stream of the copy; and waits
    assert (pinned + 1).tolist() == [2.0, 3.0, 4.0]
    late = there().to("cpu", non_blocking=True)
    with pytest.raises(RuntimeError, match="still writing"):
        late.sum()
    torch.cuda.synchronize()
    assert late.sum() == 6.0
    pageable = torch.empty(3)
    pageable.copy_(there(), non_blocking=True)  # torch waits for copies to memory that is not pinned
    assert pageable.sum() == 6.0
