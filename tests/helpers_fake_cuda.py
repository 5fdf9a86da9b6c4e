"""Rollout and update on fake CUDA tensors: ``python helpers_fake_cuda.py GUARD OFFLOAD``, a process of its own.

A build without CUDA has no device guard for it, and Python bindings and autograd ask for one even for fake tensors:
GUARD is a library that registers one that does nothing. The update is run up to its value, graph included: the engine
that would go back through the graph refuses to start without an accelerator.
"""

import sys
from dataclasses import replace

import torch
from helpers_optimized import LATENT, SmallModel, condition_of, preset_plan, prompts_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from branchgrpo.optimized.denoiser import FiniteLog
from branchgrpo.optimized.growth import shared_growth
from branchgrpo.optimized.objective import Policies, batch_terms
from branchgrpo.optimized.philox import PhiloxNoise
from branchgrpo.optimized.pruning import prune
from branchgrpo.optimized.rollout import Grower, rollout
from branchgrpo.optimized.sampling import Sampling
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
        weights = dict.fromkeys(plan.trainable_steps, 1.0)
        finite, policies = FiniteLog(), Policies(model, frozen, condition)
        terms = batch_terms([tree], policies, [advantages], work, weights, Objective(kl=0.1), finite)
        assert terms.value.device.type == "cuda"
        assert terms.value.requires_grad
    print("all on the device")


if __name__ == "__main__":
    torch.ops.load_library(sys.argv[1])
    main(sys.argv[2] == "offload")
