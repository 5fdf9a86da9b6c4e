"""Rollouts and updates on the pretended device; ``test_conformance_pretend_cuda.py`` runs them in a process with it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_optimized import LATENT, SmallModel, accumulated, condition_of, preset_plan, prompts_of, rewards_of
from torch import Tensor

from branchgrpo.conformance.adapters.optimized import OptimizedImplementation
from branchgrpo.conformance.checks.base import Subject
from branchgrpo.conformance.device_models import VARIANTS
from branchgrpo.conformance.device_table import device_table
from branchgrpo.optimized.fusion import fuse
from branchgrpo.optimized.normalization import normalize
from branchgrpo.optimized.philox import PhiloxNoise
from branchgrpo.optimized.pruning import prune
from branchgrpo.optimized.rollout import rollout
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.optimized.singular import singular_rollout
from branchgrpo.optimized.store import Store
from branchgrpo.optimized.update import UpdateStats, accumulate_gradients
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import Fusion, Normalization, Objective
from branchgrpo.reference.presets import preset
from branchgrpo.reference.protocols import TensorCondition

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def condition_on(device: torch.device) -> TensorCondition:
    return TensorCondition({"shift": condition_of(2).tensors["shift"].to(device)})


def sampling_on(device: torch.device, **options: Any) -> Sampling:
    return replace(Sampling(PhiloxNoise(3), LATENT, device=device), **options)


def updated(device: torch.device, **options: Any) -> tuple[UpdateStats, Tensor, str]:
    """A rollout, its tail and its update: statistics, gradient, and where the states were kept."""
    model, frozen, condition = SmallModel(1).to(device), SmallModel(2).to(device), condition_on(device)
    tree = rollout(preset_plan("branchgrpo"), model, prompts_of(2), condition, sampling_on(device, **options))
    values = fuse(tree, rewards_of(tree.plan, 2, 1, 4).to(device), Fusion())
    advantages = normalize(tree.plan, values, [1.0], Normalization())
    kept = prune(tree.plan, values[-1][..., 0], [], 0)
    stats = accumulate_gradients(
        [tree], model, condition, [advantages], [kept], Objective(kl=0.1), micro_batch=16, reference_model=frozen
    )
    return stats, accumulated(model).cpu(), str(tree.leaves.device)


@pytest.mark.parametrize(
    ("chunk", "noise", "storage"),
    [
        (None, PhiloxNoise(3), torch.float64),
        (None, KeyedNoise(3), torch.float32),
        (9, PhiloxNoise(3), torch.bfloat16),
        (9, KeyedNoise(3), torch.float64),
    ],
)
def test_an_offloaded_update_is_the_cpus(chunk: int | None, noise: Any, storage: torch.dtype) -> None:
    """Nine states a call come from several ranges of a level: on the CPU they would be joined while still copied."""
    options = {"noise": noise, "chunk": chunk, "storage_dtype": storage}
    stats, gradient, _ = updated(CPU, **options)
    for offload, place in ((True, "cpu"), (False, "cuda:0")):
        found = updated(CUDA, offload=offload, **options)
        assert found[0] == stats
        assert torch.equal(found[1], gradient)
        assert found[2] == place


def test_what_is_joined_while_it_is_copied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store says that its states are away: without that they are joined on the CPU, as once they were."""
    written = Store.write

    def write(self: Store, *arguments: Any) -> None:
        self.away = True
        written(self, *arguments)
        self.away = False

    monkeypatch.setattr(Store, "write", write)
    monkeypatch.setattr(Store, "room", lambda self, level, first, last: torch.empty(last - first, *LATENT, device=CUDA))
    with pytest.raises(RuntimeError, match=r"cat.*still writing"):
        updated(CUDA, offload=True, chunk=9, storage_dtype=torch.float32)


def test_families_are_grown_as_on_the_cpu() -> None:
    family, prompts = preset("g2rpo").plan_at(0, seed=0), prompts_of(2)
    assert isinstance(family, PlanFamily)
    trees = [
        singular_rollout(family, SmallModel(1).to(device), prompts, condition_on(device), sampling_on(device, chunk=9))
        for device in (CPU, CUDA)
    ]
    for member, tree in trees[0].items():
        assert {state.device for state in trees[1][member].states} == {CUDA}
        pairs = zip(trees[1][member].states, tree.states, strict=True)
        assert all(torch.equal(found.cpu(), expected) for found, expected in pairs)


class Misplacing(OptimizedImplementation):
    """Advantages scaled by a tensor that somebody left on the CPU, for the loss on the device."""

    def objective(self, traces: Any, model: Any, condition: Any, advantages: Any, *rest: Any) -> Tensor:
        value = super().objective(traces, model, condition, advantages, *rest)
        return (value * torch.ones(1, dtype=torch.float64)).sum()


def test_a_planted_mix_fails_its_rows() -> None:
    variant = next(variant for variant in VARIANTS if variant.name == "float64")
    table = device_table(Subject(Misplacing(device=CUDA), CUDA), [variant])
    assert {row.status for row in table.rows} == {"failed"}
    assert all("same device" in row.detail and "in the operation objective" in row.detail for row in table.rows)
    on_cpu = device_table(Subject(Misplacing()), [variant])
    assert {row.status for row in on_cpu.rows} == {"passed"}
