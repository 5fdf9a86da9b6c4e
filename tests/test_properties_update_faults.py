"""Faults of an update injected into a right implementation: dropped edges, several plans, subsets of chains."""

from dataclasses import replace

import pytest
import torch

from branchgrpo.conformance.adapters.optimized import OptimizedImplementation
from branchgrpo.properties.checks import objective, updates
from branchgrpo.properties.findings import failures
from branchgrpo.properties.networks import Network
from branchgrpo.properties.subject import Draws, Subject, numbered_prompts
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import DepthWindow, Objective
from branchgrpo.reference.types import Kernel, KernelKind

SDE = Kernel(KernelKind.SDE, 0.6)
PLAN = tree_plan(4, SDE, splits=(0, 1), branching=2, spread=2.0)
LATE = tree_plan(4, SDE, splits=(1,), branching=2, spread=2.0, sde_steps=(1,))
CHAINS = tree_plan(6, SDE, splits=(0,), branching=3, trained_fraction=0.4)
WEIGHTED = Objective(edge_weights="std", kl=0.3)


class KlOfDroppedEdges(OptimizedImplementation):
    """The KL term is reduced over all edges, dropped ones too."""

    def objective(self, traces, model, condition, advantages, kept, options, reduction, reference_model=None):
        zero = [tuple(torch.zeros_like(level) for level in levels) for levels in advantages]
        every = [tuple(torch.ones_like(mask) for mask in masks) for masks in kept]
        bare = replace(options, kl=0.0)
        gain = super().objective(traces, model, condition, advantages, kept, bare, reduction, None)
        return gain + super().objective(traces, model, condition, zero, every, options, reduction, reference_model)


class WeightsOfEachPlan(OptimizedImplementation):
    """Std weights of mean 1 over each plan's steps, not over those of the whole update."""

    def objective(self, traces, model, condition, advantages, kept, options, reduction, reference_model=None):
        parts = [
            super(WeightsOfEachPlan, self).objective(
                [trace], model, condition, [levels], [masks], options, reduction, reference_model
            )
            for trace, levels, masks in zip(traces, advantages, kept, strict=True)
        ]
        return torch.stack(parts).mean()


class SameSubsetEveryIteration(OptimizedImplementation):
    """The iteration is left out of the key of a chain's subset."""

    def trained_subsets(self, plan, prompts, seed, iteration):
        return super().trained_subsets(plan, prompts, seed, 0)


def case(subject, plan):
    """A part of an update off policy, of which a depth window drops some edges."""
    behaviour, policy, frozen = (Network((2,), 4) for _ in range(3))
    trace = subject.grow(plan, behaviour, KeyedNoise(6), numbered_prompts(2), Draws((2,)))
    with torch.no_grad():
        for parameter, other in zip(policy.parameters(), frozen.parameters(), strict=True):
            parameter.mul_(1.01)
            other.mul_(0.9)
    generator = torch.Generator().manual_seed(2)
    levels = tuple(torch.randn(s.shape[:2], generator=generator, dtype=torch.float64) for s in trace.states)
    kept = subject.implementation.prune(plan, levels[-1], (DepthWindow(1, 1),), 0)
    return objective.Case(trace, policy, levels, kept, WEIGHTED, reference_model=frozen)


def kept_edges(subject):
    return objective.objective_as_defined(subject, case(subject, PLAN), "fault")


def two_plans(subject):
    return updates.update_as_defined(subject, [case(subject, PLAN), case(subject, LATE)], "fault")


def subsets(subject):
    return updates.subset_findings(subject, CHAINS, numbered_prompts(3), 5, 8)


@pytest.mark.parametrize(
    ("fault", "check", "row"),
    [
        (KlOfDroppedEdges, kept_edges, "J as defined"),
        (KlOfDroppedEdges, kept_edges, "gradient as defined"),
        (WeightsOfEachPlan, two_plans, "J as defined"),
        (WeightsOfEachPlan, two_plans, "gradient as defined"),
        (SameSubsetEveryIteration, subsets, "of the chain's key"),
    ],
)
def test_the_fault_is_caught(fault, check, row):
    failed = [finding.name for finding in failures(check(Subject(fault())))]
    assert any(row in name for name in failed), failed


@pytest.mark.parametrize("check", [kept_edges, two_plans, subsets])
def test_the_right_implementation_passes(check):
    assert not [str(finding) for finding in failures(check(Subject(OptimizedImplementation())))]
