"""Clauses of spec/errors.md: every line of its example, by the message."""

import math
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers_spec import CONDITION, PROMPT, SDE, Scaled, f64, load_examples, small_plan, unchecked

from branchgrpo.conformance.clauses import clause
from branchgrpo.reference import errors
from branchgrpo.reference.depth_window import window_at
from branchgrpo.reference.errors import BranchGRPOError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.granularity import granular_indices
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.normalization import reward_weights
from branchgrpo.reference.options import (
    DepthWindow,
    ExtremeB,
    Fusion,
    Normalization,
    Objective,
)
from branchgrpo.reference.plan import Plan, branching_from_splits
from branchgrpo.reference.protocols import Guidance, TensorCondition
from branchgrpo.reference.reward import check_rewards
from branchgrpo.reference.rollout import Sampling, rollout
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import ODE, Kernel, KernelKind, LeafOutput
from branchgrpo.reference.windows import WindowSchedule

MESSAGES = load_examples("errors")["messages"]


class Answers:
    """A model that answers whatever it was told to."""

    guidance = Guidance()

    def __init__(self, answer: torch.Tensor) -> None:
        self.answer = answer

    def __call__(self, x, sigma, condition):
        return self.answer


def roll(model=None, condition=CONDITION):
    return rollout(small_plan(()), model or Scaled(), PROMPT, condition, Sampling(KeyedNoise(0), (2,)))


def schedule(*sigmas):
    steps = len(sigmas) - 1
    return Plan(sigmas, (SDE,) * steps, (1,) * steps, (1.0,) * steps)


def at_step(field, step, value):
    plan = small_plan(())
    return replace(plan, **{field: (*getattr(plan, field)[:step], value, *getattr(plan, field)[step + 1 :])})


CASES: dict[str, Callable[[], object]] = {
    "splits 0, 0 of T = 4": lambda: branching_from_splits(4, (0, 0), 2),
    "splits 99 of T = 4": lambda: branching_from_splits(4, (99,), 2),
    "splits -1 of T = 4": lambda: branching_from_splits(4, (-1,), 2),
    "K = 0 at step 1": lambda: at_step("branching", 1, 0),
    "K = 2 at an ODE step 0": lambda: replace(small_plan(()), kernels=(ODE, SDE, SDE, SDE), branching=(2, 1, 1, 1)),
    "cps with eta 1.5": lambda: Kernel(KernelKind.CPS, 1.5),
    "sde with eta -1": lambda: Kernel(KernelKind.SDE, -1.0),
    "spread NaN at step 0": lambda: at_step("spreads", 0, math.nan),
    "spread -1 at step 0": lambda: at_step("spreads", 0, -1.0),
    "beta -1": lambda: Fusion(beta=-1.0),
    "sigmas 1, 0.5, 0.5, 0": lambda: schedule(1.0, 0.5, 0.5, 0.0),
    "sigmas 1, 0.5, 0.1": lambda: schedule(1.0, 0.5, 0.1),
    "sigmas 0.9, 0": lambda: schedule(0.9, 0.0),
    "roots 0": lambda: replace(small_plan(()), roots=0),
    "granularity 0": lambda: granular_indices(1, 4, 0),
    "k = 3 of T = 4, denoised": lambda: PlanFamily(shifted_schedule(4), SDE, (3,)),
    "depth window from 9, T = 4": lambda: window_at(DepthWindow(9), 4, 0),
    "depth window of size 0": lambda: DepthWindow(1, 0),
    "fraction 0": lambda: replace(small_plan(()), trained_fraction=0.0),
    "two rewards for three leaves": lambda: check_rewards(f64([0.0, 1.0]), [PROMPT] * 3, "toy"),
    "reward NaN of leaf 1": lambda: check_rewards(f64([0.0, math.nan]), [PROMPT] * 2, "toy"),
    "velocity of another shape": lambda: roll(Answers(torch.zeros(1, 3))),
    "velocity of integers": lambda: roll(Answers(torch.zeros(1, 2, dtype=torch.int64))),
    "velocity with NaN": lambda: roll(Answers(f64([[0.0, math.nan]]))),
    "condition of two items": lambda: roll(condition=TensorCondition({"label": torch.zeros(2)})),
    "latent shape (0,)": lambda: Sampling(KeyedNoise(0), (0,)),
    "weights 1, inf": lambda: reward_weights((1.0, math.inf), 2),
    "fusion 'max'": lambda: unchecked(Fusion, kind="max"),
}


@clause("ERR-1", "ERR-2", "ERR-3", "ERR-4", "ERR-5")
@pytest.mark.parametrize("case", MESSAGES)
def test_every_message_of_the_page(case):
    with pytest.raises(BranchGRPOError) as found:
        CASES[case]()
    assert str(found.value) == MESSAGES[case]


@clause("ERR-1")
def test_the_page_and_this_file_have_the_same_cases():
    assert set(CASES) == set(MESSAGES)


@clause("ERR-1")
@pytest.mark.parametrize(
    "kind", [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, ValueError)]
)
def test_errors_carry_their_parts_and_cross_process_boundaries(kind):
    error = kind("field[3]", math.inf, "finite")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.field, copy.value, copy.legal) == (kind, "field[3]", math.inf, "finite")
    assert str(copy) == str(error) == "field[3] = inf: must be finite"


@clause("ERR-2", "KERN-4", "PLAN-3")
@pytest.mark.parametrize(
    "make",
    [
        lambda: small_plan((0,), kernel=Kernel(KernelKind.SDE, 0.0)),
        lambda: small_plan((3,), kernel=Kernel(KernelKind.CPS, 0.5), output=LeafOutput.SAMPLE),
        lambda: small_plan((3,), output=LeafOutput.DENOISED),
        lambda: Kernel(KernelKind.CPS, -0.1),
        lambda: Kernel(KernelKind.FLOW_SDE, math.nan),
    ],
    ids=["eta 0", "CPS into 0", "last step under denoised", "CPS below 0", "NaN"],
)
def test_what_cannot_be_rolled_out_is_refused_before_sampling(make):
    with pytest.raises(BranchGRPOError):
        make()


@clause("ERR-3")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_velocity_names_step_node_and_prompt(value):
    class Late(Scaled):
        def __call__(self, x, sigma, condition):
            return super().__call__(x, sigma, condition) * (value if float(sigma) == 0.5 else 1.0)

    with pytest.raises(errors.ModelError, match="velocity at step 2, node 0 of prompt 7"):
        roll(Late())


@clause("ERR-4")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_reward_is_never_skipped(value):
    with pytest.raises(errors.RewardError, match=r"leaf 2, prompt 7 \('a cat'\), model toy"):
        check_rewards(f64([0.0, 1.0, value]), [PROMPT] * 3, "toy")


UNKNOWN = {
    Fusion: {"kind": "mean"},
    Normalization: {"mean_scope": "batch", "std_scope": "rank", "order": "sum", "bessel": 2},
    Objective: {"reduction": "mean", "edge_weights": "sigma", "kl": -0.1},
    ExtremeB: {"b": 0},
    DepthWindow: {"direction": 0},
    WindowSchedule: {"order": "backward", "decay": "cosine", "end": "loop", "rate": -1.0},
}
NEEDED = {ExtremeB: {"b": 1}, DepthWindow: {"start": 1}, WindowSchedule: {"size": 2, "last": 4}}


@clause("ERR-5")
@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, fields in UNKNOWN.items() for field in fields])
def test_unknown_options_are_refused_when_they_are_made(kind, field):
    assert unchecked(kind, **NEEDED.get(kind, {})) == kind(**NEEDED.get(kind, {}))
    with pytest.raises(errors.OptionError, match=field):
        unchecked(kind, **NEEDED.get(kind, {}) | {field: UNKNOWN[kind][field]})
    with pytest.raises(TypeError):
        kind(**NEEDED.get(kind, {}), colour="blue")
