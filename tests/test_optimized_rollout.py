"""The rollout's mechanics: packing, storage, precision, faults, and nothing that waits for a device."""

import math

import pytest
import torch
from helpers_optimized import LATENT, SmallModel, close, condition_of, preset_plan, prompts_of, shapes_unchecked
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from branchgrpo.optimized.growth import shared_growth
from branchgrpo.optimized.log_probability import log_probability
from branchgrpo.optimized.philox import PhiloxNoise
from branchgrpo.optimized.rollout import Grower, rollout, rollouts
from branchgrpo.optimized.sampling import Sampling
from branchgrpo.reference.counts import count
from branchgrpo.reference.errors import InputError, ModelError, OptionError, PlanError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.presets import preset
from branchgrpo.reference.protocols import Condition, TensorCondition
from branchgrpo.reference.types import Kernel, KernelKind, Reduction

SDE = Kernel(KernelKind.SDE, 0.3)


class Recorder(SmallModel):
    """A model that remembers the noise levels of its items."""

    def __init__(self) -> None:
        super().__init__(1)
        self.sigmas: list[list[float]] = []

    def forward(self, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        self.sigmas.append(sorted(set(sigma.tolist())))
        return super().forward(x, sigma, condition)


def sampling(**options: object) -> Sampling:
    return Sampling(KeyedNoise(3), LATENT, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [16, 40])
@shapes_unchecked()
def test_items_of_different_levels_fill_calls_to_the_capacity(capacity: int) -> None:
    plan, model = preset_plan("branchgrpo"), Recorder()
    rollout(plan, model, prompts_of(3), condition_of(3), sampling(chunk=capacity))
    assert sum(model.calls) == 3 * count(preset("branchgrpo")).denoiser_calls
    assert max(model.calls) <= capacity
    if capacity == 40:
        # 48 leaves a level do not divide by 40: full calls must reach over two levels.
        assert any(len(levels) > 1 for levels in model.sigmas)
        busy = [size for size, levels in zip(model.calls, model.sigmas, strict=True) if min(levels) < plan.sigmas[10]]
        assert busy[:-1].count(40) >= len(busy) - 3


def test_plans_share_the_calls_that_have_equal_inputs() -> None:
    early = tree_plan(6, SDE, splits=(3,), branching=2, sde_steps=())
    late = tree_plan(6, SDE, splits=(3,), branching=2, sde_steps=(5,), output=early.output)
    other = tree_plan(6, SDE, splits=(1,), branching=3, sde_steps=())
    model, prompts, condition = SmallModel(1), prompts_of(2), condition_of(2)
    together = rollouts([early, late, other], model, prompts, condition, sampling())
    # early and late differ only in a step that `denoised` makes an ODE step: 3 + 1 + 2·2 calls once, then the third's.
    assert sum(model.calls) == 2 * (4 + 2 * 2 + 3 * 4)
    for plan, tree in zip([early, late, other], together, strict=True):
        alone = rollout(plan, SmallModel(1), prompts, condition, sampling())
        assert all(close(a, b) for a, b in zip(tree.states, alone.states, strict=True))
    assert together[0].states[5].data_ptr() == together[1].states[5].data_ptr()


@shapes_unchecked()
def test_mixgrpo_shares_its_ode_prefix_and_the_family_its_anchor() -> None:
    mix = preset("mixgrpo").plan_at(200, 0)
    assert isinstance(mix, Plan)
    assert mix.splits[0] > 0
    model = SmallModel(1)
    rollout(mix, model, prompts_of(1), condition_of(1), sampling())
    assert (
        sum(model.calls)
        == count(preset("mixgrpo"), 200).denoiser_calls
        == mix.splits[0] + 1 + 12 * (24 - mix.splits[0])
    )
    for name, calls in {"g2rpo-single": 1112, "g2rpo-12": 1544, "g2rpo": 1820}.items():
        family = preset(name).sampler
        assert isinstance(family, PlanFamily)
        growth, paths = shared_growth([family.member(*member) for member in family.members()])
        assert growth.calls == calls
        assert len(paths) == len(list(family.members()))


def test_every_state_is_stored_once() -> None:
    plan = preset_plan("branchgrpo")
    tree = rollout(
        plan,
        SmallModel(1, dtype=torch.float32),
        prompts_of(2),
        condition_of(2),
        sampling(dtype=torch.float32, storage_dtype=torch.bfloat16),
    )
    nodes = 2 * 219
    assert sum(state.numel() for state in tree.states) == nodes * math.prod(LATENT)
    assert {state.dtype for state in tree.states} == {torch.bfloat16}
    assert tree.means is None


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
def test_log_probabilities_are_those_of_the_stored_children(storage: torch.dtype) -> None:
    plan = preset_plan("branchgrpo")
    tree = rollout(
        plan,
        SmallModel(1),
        prompts_of(2),
        condition_of(2),
        sampling(storage_dtype=storage, keep_means=True, reduction=Reduction.SUM),
    )
    assert tree.means is not None
    for depth, (mean, found) in enumerate(zip(tree.means, tree.log_probs, strict=True), start=1):
        if found is None:
            continue
        child, std = tree.states[depth].flatten(0, 1), tree.stds[depth - 1]
        assert child.dtype is storage
        expected = log_probability(child, mean.flatten(0, 1), std, Reduction.SUM)
        assert close(found.flatten(), expected)
        unrounded = log_probability(child.double() + 1e-3, mean.flatten(0, 1), std, Reduction.SUM)
        assert not close(found.flatten(), unrounded)


def test_padded_calls_have_one_size_and_the_same_result() -> None:
    plan, model = preset_plan("branchgrpo"), SmallModel(1)
    base = rollout(plan, SmallModel(1), prompts_of(2), condition_of(2), sampling())
    tree = rollout(plan, model, prompts_of(2), condition_of(2), sampling(chunk=7, pad=True))
    assert set(model.calls) == {7}
    assert all(close(a, b) for a, b in zip(tree.states, base.states, strict=True))


def test_offloaded_states_are_on_the_cpu_and_the_same() -> None:
    plan = preset_plan("branchgrpo")
    base = rollout(plan, SmallModel(1), prompts_of(1), condition_of(1), sampling())
    tree = rollout(plan, SmallModel(1), prompts_of(1), condition_of(1), sampling(offload=True))
    assert all(torch.equal(a, b) and b.device.type == "cpu" for a, b in zip(base.states, tree.states, strict=True))


def test_wrong_input_is_refused() -> None:
    plan, model = preset_plan("branchgrpo"), SmallModel(1)
    prompts = prompts_of(2)
    with pytest.raises(InputError, match=r"len\(condition\) = 3: must be 2, one item a prompt"):
        rollout(plan, model, prompts, condition_of(3), sampling())
    with pytest.raises(InputError, match=r"prompts\[1\]\.id = 5: must be named once"):
        rollout(plan, model, [prompts[0], prompts[0]], condition_of(2), sampling())
    with pytest.raises(InputError, match=r"prompts = .*: must be at least one prompt"):
        rollout(plan, model, [], condition_of(1), sampling())
    with pytest.raises(PlanError, match=r"plans = .*: must be at least one plan"):
        rollouts([], model, prompts, condition_of(2), sampling())
    with pytest.raises(PlanError, match="roots = 2: must be 1 for all plans of one rollout"):
        rollouts([plan, tree_plan(3, SDE, roots=2)], model, prompts, condition_of(2), sampling())
    with pytest.raises(OptionError, match=r"sampling\.chunk = 0: must be None or an integer ≥ 1"):
        sampling(chunk=0)
    with pytest.raises(OptionError, match=r"sampling\.pad = True"):
        sampling(pad=True)
    with pytest.raises(OptionError, match=r"sampling\.storage_dtype"):
        sampling(storage_dtype=torch.int8)
    assert model.calls == []


class Faulty(SmallModel):
    """Non-finite for one prompt below a noise level; or of a wrong shape or dtype."""

    def __init__(self, fault: str) -> None:
        super().__init__(1)
        self.fault = fault

    def forward(self, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        v = super().forward(x, sigma, condition)
        if self.fault == "shape":
            return v.flatten(1)
        if self.fault == "dtype":
            return v.to(torch.int32)
        assert isinstance(condition, TensorCondition)
        mine = condition.tensors["shift"][:, 0] == condition_of(2).tensors["shift"][1, 0]
        return torch.where((mine & (sigma < 0.9))[:, None, None], torch.nan, v)


@shapes_unchecked()
def test_faults_of_a_model_are_named() -> None:
    plan, prompts, condition = preset_plan("branchgrpo"), prompts_of(2), condition_of(2)
    step = next(i for i, sigma in enumerate(plan.sigmas) if sigma < 0.9)
    where = f"velocity at step {step}, node 0 of prompt {prompts[1].id} = 'NaN or ±inf': must be finite"
    for chunk in (None, 3):
        with pytest.raises(ModelError, match=where):
            rollout(plan, Faulty("value"), prompts, condition, sampling(chunk=chunk))
    with pytest.raises(ModelError, match=r"velocity at step 0: shape = \(2, 6\): must be \(2, 2, 3\)"):
        rollout(plan, Faulty("shape"), prompts, condition, sampling())
    with pytest.raises(ModelError, match=r"velocity at step 0: dtype = torch\.int32: must be a floating dtype"):
        rollout(plan, Faulty("dtype"), prompts, condition, sampling())


class Large(SmallModel):
    """Velocities that grow beyond float16 below a noise level."""

    def forward(self, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        return torch.where((sigma < 0.93)[:, None, None], 1e7, super().forward(x, sigma, condition))


@pytest.mark.parametrize("name", ["branchgrpo", "branchgrpo-mix"])
@shapes_unchecked()
def test_an_overflow_of_the_storage_dtype_is_named(name: str) -> None:
    """Of a stochastic step or, where sampling is mixed, of a deterministic one."""
    plan, prompts, condition = preset_plan(name), prompts_of(2), condition_of(2)
    step = next(i for i, sigma in enumerate(plan.sigmas) if sigma < 0.93)
    assert (step in plan.stochastic_steps) == (name == "branchgrpo")
    where = f"children at step {step}, node 0 of prompt {prompts[0].id} = '±inf': must be within ±65504, the range of"
    for arithmetic in (torch.float32, torch.float64):
        model, options = Large(1, dtype=arithmetic), sampling(dtype=arithmetic, storage_dtype=torch.float16)
        with pytest.raises(ModelError, match=where + r" torch\.float16, in which states are stored"):
            rollout(plan, model, prompts, condition, options)
    rollout(plan, Large(1), prompts, condition, sampling(storage_dtype=torch.bfloat16))


@shapes_unchecked()
def test_a_velocity_beyond_the_range_of_a_half_precision_arithmetic_is_named() -> None:
    options = sampling(dtype=torch.float16, storage_dtype=torch.float16)
    with pytest.raises(ModelError, match=r"velocity at step .* must be finite and within ±65504, the range of torch"):
        rollout(preset_plan("branchgrpo"), Large(1, dtype=torch.float16), prompts_of(2), condition_of(2), options)


class NoSync(TorchDispatchMode):
    """Refuses what makes the CPU wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "item"), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def test_the_forbidding_mode_sees_a_wait() -> None:
    with NoSync(), pytest.raises(AssertionError, match="_local_scalar_dense waits"):
        float(torch.ones(2).sum())
    with NoSync(), pytest.raises(AssertionError, match="nonzero waits"):
        torch.ones(2).nonzero()


@pytest.mark.parametrize("chunk", [None, 5])
def test_no_rollout_step_waits_for_the_device(chunk: int | None) -> None:
    plan = preset_plan("branchgrpo-mix", 30)
    options = Sampling(PhiloxNoise(3), LATENT, chunk=chunk, storage_dtype=torch.bfloat16)
    growth, _ = shared_growth([plan])
    grower = Grower(growth, prompts_of(2), condition_of(2), options)
    with NoSync():
        finite = grower.grow(SmallModel(1))
    assert bool(finite)
    grower.judge_stochastic_steps()
    assert grower.finite.fault(tuple(prompts_of(2))) is None
