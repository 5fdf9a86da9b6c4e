"""Compiled against eager: the same step and the same numbers to rounding; eager where compiling fails."""

import pytest
import torch
from helpers_optimized import LATENT, SmallModel, all_close, condition_of, preset_plan, prompts_of
from torch import Tensor

from branchgrpo.optimized import compiling
from branchgrpo.optimized import rollout as growing
from branchgrpo.optimized.compiling import compiled
from branchgrpo.optimized.fused import advance
from branchgrpo.optimized.kernels import step_coefficients
from branchgrpo.optimized.noise import KeyedNoise
from branchgrpo.optimized.rollout import rollout
from branchgrpo.optimized.sampling import Sampling


@pytest.mark.slow
@pytest.mark.parametrize("storage", [torch.float64, torch.bfloat16])
def test_the_compiled_step_is_the_eager_one(storage: torch.dtype) -> None:
    plan, generator = preset_plan("branchgrpo"), torch.Generator().manual_seed(1)
    for step, factor in ((0, 2), (1, 1), (9, 2), (12, 1)):
        x, v = (torch.randn(5, *LATENT, generator=generator, dtype=torch.float64) for _ in range(2))
        noise = torch.randn(5 * factor, *LATENT, generator=generator, dtype=torch.float64)
        stored = [torch.empty(5 * factor, *LATENT, dtype=storage) for _ in range(2)]
        arguments = (x, v, noise, step_coefficients(plan, step))
        expected = advance(*arguments, stored[0])
        found = advance(*arguments, stored[1], compile=True)
        assert all_close([*found, stored[1]], [*expected, stored[0]])


@pytest.mark.slow
def test_compiled_rollouts_are_the_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "COMPILE_FROM", 0)
    plan, prompts, condition = preset_plan("branchgrpo"), prompts_of(2), condition_of(2)
    base = rollout(plan, SmallModel(1), prompts, condition, Sampling(KeyedNoise(3), LATENT))
    fast = rollout(plan, SmallModel(1), prompts, condition, Sampling(KeyedNoise(3), LATENT, chunk=7, compile=True))
    assert all_close(fast.states, base.states)
    assert all_close(fast.log_probs, base.log_probs)


def test_what_cannot_be_compiled_runs_in_eager_mode_after_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def refuse(function: object, **options: object) -> object:
        def call(*arguments: object) -> object:
            tries.append(1)
            raise torch._dynamo.exc.TorchDynamoException("no compiler")

        return call

    def double(x: Tensor) -> Tensor:
        return 2 * x

    monkeypatch.setattr(compiling.torch, "compile", refuse)
    call = compiled(double)
    with pytest.warns(UserWarning, match=r"double runs in eager mode, it cannot be compiled here: .*no compiler"):
        assert torch.equal(call(torch.ones(2)), 2 * torch.ones(2))
    assert torch.equal(call(torch.ones(3)), 2 * torch.ones(3))
    assert len(tries) == 1
