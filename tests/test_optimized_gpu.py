"""What only a CUDA device can show: no synchronisation, compiled against eager, determinism, the CPU's numbers."""

import pytest
import torch
from helpers_optimized import (
    LATENT,
    SmallModel,
    accumulated,
    all_close,
    close,
    condition_of,
    preset_plan,
    prompts_of,
    rewards_of,
)

from branchgrpo.optimized import rollout as growing
from branchgrpo.optimized.fusion import fuse
from branchgrpo.optimized.growth import shared_growth
from branchgrpo.optimized.normalization import normalize
from branchgrpo.optimized.philox import PhiloxNoise
from branchgrpo.optimized.pruning import prune
from branchgrpo.optimized.rollout import Grower, rollout
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.optimized.tree import Tree
from branchgrpo.optimized.update import accumulate_gradients
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import Fusion, Normalization, Objective
from branchgrpo.reference.protocols import NoiseSource, TensorCondition

pytestmark = pytest.mark.gpu


def on_device(count: int) -> TensorCondition:
    return TensorCondition({"shift": condition_of(count).tensors["shift"].cuda()})


def grown(noise: NoiseSource, **options: object) -> Tree:
    sampling = Sampling(noise, LATENT, device=torch.device("cuda", 0), **options)  # type: ignore[arg-type]
    return rollout(preset_plan("branchgrpo"), SmallModel(1).cuda(), prompts_of(2), on_device(2), sampling)


def test_rollout_steps_never_synchronise() -> None:
    plan, condition, model = preset_plan("branchgrpo"), on_device(2), SmallModel(1).cuda()
    growth, _ = shared_growth([plan])
    sampling = Sampling(PhiloxNoise(3), LATENT, torch.float32, torch.bfloat16, device=torch.device("cuda", 0), chunk=16)
    grower = Grower(growth, prompts_of(2), condition, sampling)
    torch.cuda.set_sync_debug_mode("error")
    try:
        grower.grow(model.float())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_keyed_rollouts_equal_the_cpus() -> None:
    sampling = Sampling(KeyedNoise(3), LATENT)
    expected = rollout(preset_plan("branchgrpo"), SmallModel(1), prompts_of(2), condition_of(2), sampling)
    for offload in (False, True):
        found = grown(KeyedNoise(3), chunk=9, offload=offload)
        assert all_close([state.cpu() for state in found.states], expected.states)
        assert all_close([lp if lp is None else lp.cpu() for lp in found.log_probs], expected.log_probs)


def test_compiled_rollouts_equal_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "COMPILE_FROM", 0)
    eager, fast = grown(KeyedNoise(3)), grown(KeyedNoise(3), compile=True)
    assert all_close(fast.states, eager.states)
    assert all_close(fast.log_probs, eager.log_probs)


def test_two_runs_are_bit_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
    condition, gradients = on_device(2), []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            tree, model = grown(PhiloxNoise(3)), SmallModel(1).cuda()
            values = fuse(tree, rewards_of(tree.plan, 2, 1, 4), Fusion())
            advantages = normalize(tree.plan, values, [1.0], Normalization())
            kept = prune(tree.plan, values[-1][..., 0], [], 0)
            accumulate_gradients([tree], model, condition, [advantages], [kept], Objective(), micro_batch=16)
            gradients.append(accumulated(model))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*gradients)
    assert not close(gradients[0], torch.zeros_like(gradients[0]))
