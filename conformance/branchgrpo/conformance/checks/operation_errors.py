"""Operation checks of refusals: bad input is an error before it can do harm."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from branchgrpo.conformance.checks.base import Subject, expect_refused, operation_check
from branchgrpo.conformance.checks.fixtures import (
    all_edges,
    alternating,
    network,
    prompts_of,
    rewards_of,
    rolled,
    sampling,
    small_plan,
)
from branchgrpo.conformance.clauses import clause
from branchgrpo.conformance.subjects import condition_for
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import ExtremeB, Fusion, Normalization, Objective, ParentTop1
from branchgrpo.reference.protocols import Condition, Guidance, VelocityModel
from branchgrpo.reference.types import Kernel, KernelKind, Reduction


class Broken:
    """A model that spoils the velocity of another."""

    guidance = Guidance()

    def __init__(self, model: torch.nn.Module, spoil: Callable[[Tensor], Tensor]) -> None:
        self.model, self.spoil = model, spoil

    def __call__(self, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """The spoiled velocity."""
        return self.spoil(self.model(x, sigma, condition))


def one_nan(v: Tensor) -> Tensor:
    """A single NaN."""
    spoiled = v.clone()
    spoiled.view(-1)[-1] = math.nan
    return spoiled


@operation_check
@clause("ERR-3")
def a_broken_model_is_refused(subject: Subject) -> None:
    """A velocity of another shape, or with a NaN, and a condition of another batch are errors."""
    model, plan = network(subject), small_plan(subject)
    spoils: dict[str, Callable[[Tensor], Tensor]] = {
        "a NaN velocity": one_nan,
        "an infinite velocity": lambda v: v / 0.0,
        "a velocity of another shape": lambda v: v[:, :1],
    }
    for what, spoil in spoils.items():
        expect_refused(lambda spoil=spoil: rolled(subject, plan, model=Broken(model, spoil)), what)  # type: ignore[misc]
    prompts = prompts_of(2)
    short = condition_for(prompts[:1], torch.float64, subject.device)
    implementation = subject.operation("rollout")
    expect_refused(
        lambda: implementation.rollout(plan, model, prompts, short, KeyedNoise(1), **sampling()),
        "a condition of one item for two prompts",
    )


@operation_check
@clause("ERR-4")
def broken_rewards_are_refused(subject: Subject) -> None:
    """Rewards of a wrong length, a non-finite reward and weights of a wrong length are errors."""
    plan = small_plan(subject)
    trace = rolled(subject, plan)
    rewards = rewards_of(trace)
    fuse, normalize = subject.operation("fuse").fuse, subject.operation("normalize").normalize
    expect_refused(lambda: fuse(trace, rewards[:, :-1], Fusion()), "a missing reward")
    for bad in (math.nan, math.inf):
        spoiled = rewards.clone()
        spoiled[0, 0, 0] = bad
        expect_refused(lambda spoiled=spoiled: fuse(trace, spoiled, Fusion()), f"the reward {bad}")  # type: ignore[misc]
    values = fuse(trace, rewards, Fusion())
    expect_refused(lambda: normalize(plan, values, (1.0, 1.0), Normalization()), "two weights for one reward model")


@operation_check
@clause("ERR-2")
def nothing_to_train_is_refused(subject: Subject) -> None:
    """An empty trained set, and width pruning without a split, are errors."""
    trace = rolled(subject, small_plan(subject))
    condition = condition_for(trace.prompts, torch.float64, subject.device)
    nothing = tuple(torch.zeros_like(mask) for mask in all_edges(trace))
    implementation = subject.operation("objective")
    expect_refused(
        lambda: implementation.objective(
            [trace], network(subject), condition, [alternating(trace)], [nothing], Objective(), Reduction.MEAN, None
        ),
        "an objective over no edge",
    )
    flat = tree_plan(5, Kernel(KernelKind.SDE, 0.3))
    keys = torch.zeros(1, 1, dtype=torch.float64, device=subject.device)
    prune = subject.operation("prune").prune
    expect_refused(lambda: prune(flat, keys, (ParentTop1(),), 0), "Parent-Top1 without a split")
    expect_refused(lambda: prune(flat, keys, (ExtremeB(1),), 0), "Extreme-b without a split")


@operation_check
@clause("OBJ-8")
def conditions_match_the_trees(subject: Subject) -> None:
    """An objective over two prompts refuses one condition."""
    trace = rolled(subject, small_plan(subject))
    short = condition_for(trace.prompts[:1], torch.float64, subject.device)
    implementation = subject.operation("objective")
    expect_refused(
        lambda: implementation.objective(
            [trace],
            network(subject),
            short,
            [alternating(trace)],
            [all_edges(trace)],
            Objective(),
            Reduction.MEAN,
            None,
        ),
        "one condition for two prompts",
    )


@operation_check
@clause("ERR-5")
def options_without_effect_are_refused(subject: Subject) -> None:
    """A KL without a frozen policy, and a frozen policy without a KL, are errors."""
    trace = rolled(subject, small_plan(subject))
    condition = condition_for(trace.prompts, torch.float64, subject.device)
    implementation = subject.operation("objective")

    def objective(options: Objective, frozen: VelocityModel | None) -> object:
        edges, advantages = [all_edges(trace)], [alternating(trace)]
        policy = network(subject)
        return implementation.objective([trace], policy, condition, advantages, edges, options, Reduction.MEAN, frozen)

    expect_refused(lambda: objective(Objective(kl=0.1), None), "β_KL = 0.1 without a frozen policy")
    expect_refused(lambda: objective(Objective(), network(subject, 0.8)), "β_KL = 0 with a frozen policy")
