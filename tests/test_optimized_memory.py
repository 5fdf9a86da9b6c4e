"""Activations held for the backward: bounded by the micro-batch, whatever the number of edges."""

import weakref

import pytest
import torch
from helpers_optimized import LATENT, SmallModel, condition_of, preset_plan, prompts_of, shapes_unchecked
from torch import Tensor

from branchgrpo.optimized.philox import PhiloxNoise
from branchgrpo.optimized.pruning import prune
from branchgrpo.optimized.rollout import rollout
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.optimized.update import accumulate_gradients
from branchgrpo.reference.options import Objective


class Held:
    """A saved tensor, counted while something holds it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Meter:
    """Bytes that autograd holds, now and at most."""

    def __init__(self) -> None:
        self.now, self.most = 0, 0

    def pack(self, tensor: Tensor) -> Held:
        held, size = Held(tensor), tensor.numel() * tensor.element_size()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(held, self.release, size)
        return held

    def release(self, size: int) -> None:
        self.now -= size

    def unpack(self, held: Held) -> Tensor:
        return held.tensor


def most_held(prompts: int, micro_batch: int | None) -> int:
    plan, meter, model = preset_plan("branchgrpo"), Meter(), SmallModel(1)
    condition = condition_of(prompts)
    tree = rollout(plan, model, prompts_of(prompts), condition, Sampling(PhiloxNoise(1), LATENT))
    advantages = tuple(torch.ones(state.shape[:2], dtype=torch.float64) for state in tree.states)
    kept = prune(plan, torch.zeros(prompts, plan.leaves, dtype=torch.float64), [], 0)
    with torch.autograd.graph.saved_tensors_hooks(meter.pack, meter.unpack):
        accumulate_gradients([tree], model, condition, [advantages], [kept], Objective(), micro_batch=micro_batch)
    assert meter.now == 0
    return meter.most


@shapes_unchecked()
def test_activations_are_flat_in_the_number_of_edges() -> None:
    four, eight = most_held(4, 16), most_held(8, 16)
    # From four prompts on some micro-batch is all split parents: 16 of them with 32 edges, and no batch holds more.
    assert eight == four
    assert most_held(4, None) > 8 * four


@shapes_unchecked()
def test_the_meter_sees_the_micro_batch() -> None:
    assert most_held(1, 32) == pytest.approx(2 * most_held(1, 16), rel=0.4)
