"""Rollout and update on fake CUDA tensors: ``python helpers_fake_cuda.py GUARD OFFLOAD``, a process of its own.

A build without CUDA has no device guard for it, and Python bindings and autograd ask for one even for fake tensors:
GUARD is a library that registers one that does nothing. The engine that would go back through the update's graph
refuses to start without an accelerator, which is checked; ``go_back`` takes its place.
"""

import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers_optimized import LATENT, SmallModel, condition_of, preset_plan, prompts_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node

from branchgrpo.optimized.denoiser import FiniteLog
from branchgrpo.optimized.growth import shared_growth
from branchgrpo.optimized.objective import Policies, batch_terms
from branchgrpo.optimized.philox import PhiloxNoise
from branchgrpo.optimized.pruning import prune
from branchgrpo.optimized.rollout import Grower, rollout
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.optimized.table import tabulate
from branchgrpo.optimized.work import plan_work
from branchgrpo.reference.options import Objective
from branchgrpo.reference.protocols import TensorCondition

CUDA = torch.device("cuda:0")


class OnFakeCuda(SmallModel):
    """The small model with fake parameters on the fake device."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32, device=CUDA)))


def go_back(value: torch.Tensor) -> None:
    """What autograd's engine does: call every node of the graph once all its gradients are there."""
    waiting: Counter[Node] = Counter()
    seen, stack = set(), [value.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for after, _ in node.next_functions:
            if after is not None:
                waiting[after] += 1
                stack.append(after)
    arrived: dict[Node, dict[int, torch.Tensor]] = {value.grad_fn: {0: torch.ones_like(value)}}
    ready = [value.grad_fn]
    while ready:
        node = ready.pop()
        inputs = arrived.pop(node)
        call = node if callable(node) else node.apply  # nodes of Python functions cannot be called
        found = call(*(inputs.get(i) for i in range(max(inputs) + 1)))
        gradients = found if isinstance(found, tuple) else (found,)
        for gradient, (after, place) in zip(gradients, node.next_functions, strict=False):
            if after is None:
                continue
            if gradient is not None:
                mine = arrived.setdefault(after, {})
                gradient = gradient.sum_to_size(after._input_metadata[place].shape)  # what was broadcast forward
                mine[place] = gradient if place not in mine else mine[place] + gradient
            waiting[after] -= 1
            if waiting[after] == 0:
                ready.append(after)


def main(offload: bool) -> None:
    plan, prompts = preset_plan("branchgrpo"), tuple(prompts_of(2))
    options = Sampling(PhiloxNoise(3), LATENT, torch.float32, torch.bfloat16, device=CUDA, chunk=16, offload=offload)
    real = rollout(
        plan, SmallModel(1, dtype=torch.float32), prompts, condition_of(2), replace(options, device=torch.device("cpu"))
    )
    kept = prune(plan, torch.zeros(2, plan.leaves, dtype=torch.float64), [], 0)
    work = plan_work([real], [kept], Objective())
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, frozen = OnFakeCuda(), OnFakeCuda()
        condition = TensorCondition({"shift": torch.empty(2, 6, device=CUDA)})
        growth, paths = shared_growth([plan])
        grower = Grower(growth, prompts, condition, options)
        grower.grow(model)
        tree = grower.store.tree(plan, paths[0])
        assert {state.device.type for state in tree.states} == {"cpu" if offload else "cuda"}
        assert {lp.device.type for lp in tree.log_probs if lp is not None} == {"cuda"}
        advantages = tuple(torch.zeros(state.shape[:2], dtype=torch.float64) for state in tree.states)
        table = tabulate([tree], [advantages], work, dict.fromkeys(plan.trainable_steps, 1.0))
        finite, policies = FiniteLog(), Policies(model, frozen, condition)
        terms, pullback = batch_terms([tree], policies, work, table, Objective(kl=0.1), finite)
        value = pullback.attached(terms.value)
        assert value.device.type == "cuda"
        assert value.requires_grad
        with pytest.raises(RuntimeError, match="Cannot access accelerator device when none is available"):
            pullback.backward(-1.0)
        assert {p.grad for p in model.parameters()} == {None}
        go_back(value)
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.device.type == "cuda"
            assert parameter.grad.shape == parameter.shape
        assert {p.grad for p in frozen.parameters()} == {None}
    print("all on the device")


if __name__ == "__main__":
    torch.ops.load_library(sys.argv[1])
    main(sys.argv[2] == "offload")
