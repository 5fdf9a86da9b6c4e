"""Faults injected into a right implementation: each is caught by the check that is there for it, and by no luck.

Every fault is one change away from right; the same check passes on the implementation without it.
"""

from contextlib import contextmanager
from dataclasses import replace

import jaxtyping
import numpy as np
import pytest
import torch

from branchgrpo.conformance.adapters.optimized import OptimizedImplementation
from branchgrpo.oracle.reward import linear_reward
from branchgrpo.properties.checks import laws, noise, objective, rollout, singular, values, z_scored
from branchgrpo.properties.findings import failures
from branchgrpo.properties.networks import Elementwise, Network
from branchgrpo.properties.sources import MaskedNoise, RenamedNoise
from branchgrpo.properties.subject import Draws, Subject, numbered_prompts
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.options import DepthWindow, Fusion, Normalization, Objective
from branchgrpo.reference.protocols import NoiseRole
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.types import Kernel, KernelKind

SDE = Kernel(KernelKind.SDE, 0.3)
PLAN = tree_plan(4, SDE, splits=(0, 1), branching=2, spread=2.0, roots=2)
SIZE = 2000


class SkippedShared(OptimizedImplementation):
    """ξ_b = c·η_b: the shared draw left out."""

    def rollout(self, plan, model, prompts, condition, noise, **options):
        bare = MaskedNoise(noise, lambda role, depth: role is NoiseRole.SHARED)
        return super().rollout(plan, model, prompts, condition, bare, **options)


class PrivateOnly(OptimizedImplementation):
    """ξ_b = η_b: every spread treated as ∞."""

    def rollout(self, plan, model, prompts, condition, noise, **options):
        loose = replace(plan, spreads=(float("inf"),) * plan.steps)
        return replace(super().rollout(loose, model, prompts, condition, noise, **options), plan=plan)


class OneShared:
    """The shared draw of a step's first parent, for all parents of the step."""

    def __init__(self, source):
        self.source = source

    def draw(self, keys, shape, dtype, device):
        if keys.role is NoiseRole.SHARED:
            keys = replace(keys, nodes=torch.zeros_like(keys.nodes))
        return self.source.draw(keys, shape, dtype, device)


class SharedAcrossParents(OptimizedImplementation):
    """One ξ₀ a step, not one a splitting parent."""

    def rollout(self, plan, model, prompts, condition, noise, **options):
        return super().rollout(plan, model, prompts, condition, OneShared(noise), **options)


class SharedAcrossPrompts(OptimizedImplementation):
    """All prompts drawn with the key of prompt 0."""

    def rollout(self, plan, model, prompts, condition, noise, **options):
        class Blind:
            def draw(self, keys, shape, dtype, device):
                return noise.draw(replace(keys, prompts=torch.zeros_like(keys.prompts)), shape, dtype, device)

        return super().rollout(plan, model, prompts, condition, Blind(), **options)


class WrongStd(OptimizedImplementation):
    """Log-probabilities with the std of a unit step, g instead of g√Δ."""

    def rollout(self, plan, model, prompts, condition, noise, **options):
        trace = super().rollout(plan, model, prompts, condition, noise, **options)
        scores = []
        for i, edges in enumerate(trace.log_probs):
            if edges is not None:
                child, mean = trace.states[i + 1].flatten(0, 1), trace.means[i].flatten(0, 1)
                std = float(trace.stds[i]) / plan.deltas[i] ** 0.5
                edges = self.log_probability(child, mean, std, options["reduction"]).reshape(edges.shape)
            scores.append(edges)
        return replace(trace, log_probs=tuple(scores))


class WrongLeaf(OptimizedImplementation):
    """Each leaf's reward gets its sibling's weight."""

    def fuse(self, trace, rewards, options):
        turned = tuple(None if edges is None else edges.flip(1) for edges in trace.log_probs)
        return super().fuse(replace(trace, log_probs=turned), rewards, options)


class WrongSet(OptimizedImplementation):
    """Advantages over all trees of the prompt where the tree was asked for."""

    def normalize(self, plan, values, weights, options):
        return super().normalize(plan, values, weights, replace(options, mean_scope="prompt"))


class PopulationStd(OptimizedImplementation):
    """Advantages over √(mean of squares), Bessel's correction left out."""

    def normalize(self, plan, values, weights, options):
        return super().normalize(plan, values, weights, replace(options, bessel=False))


class BatchStd(OptimizedImplementation):
    """Advantages over the std of all prompts where the tree's was asked for."""

    def normalize(self, plan, values, weights, options):
        return super().normalize(plan, values, weights, replace(options, std_scope="batch"))


class SiblingScores(OptimizedImplementation):
    """Advantages over the children of one parent, not over the depth: the wrong set below a second split."""

    def normalize(self, plan, values, weights, options):
        levels = [super().normalize(plan, values, weights, options)[0]]
        for depth, factor in enumerate(plan.branching, start=1):
            level = values[depth]
            families = level.reshape(-1, max(factor, 2) if level.shape[1] > 1 else 1)
            centred = families - families.mean(dim=1, keepdim=True)
            std = families.std(dim=1, keepdim=True) if families.shape[1] > 1 else torch.ones_like(centred)
            levels.append((centred / std).reshape(level.shape[:2]))
        return tuple(levels)


class OnePercent(OptimizedImplementation):
    """Advantages, and with them every factor φ, one per cent too large."""

    def normalize(self, plan, values, weights, options):
        return tuple(1.01 * level for level in super().normalize(plan, values, weights, options))


class Leak(OptimizedImplementation):
    """Pruned edges stay in the loss."""

    def objective(self, traces, model, condition, advantages, kept, *options):
        everything = [tuple(torch.ones_like(mask) for mask in masks) for masks in kept]
        return super().objective(traces, model, condition, advantages, everything, *options)


class SlightLeak(OptimizedImplementation):
    """Pruned edges add a millionth of their gradient."""

    def objective(self, traces, model, condition, advantages, kept, *options):
        right = super().objective(traces, model, condition, advantages, kept, *options)
        everything = [tuple(torch.ones_like(mask) for mask in masks) for masks in kept]
        return right + 1e-6 * super().objective(traces, model, condition, advantages, everything, *options)


class ForgottenRounding(OptimizedImplementation):
    """Log-probabilities of the states before they were stored."""

    def rollout(self, plan, model, prompts, condition, noise, **options):
        exact = super().rollout(
            plan, model, prompts, condition, noise, **{**options, "storage_dtype": options["dtype"]}
        )
        stored = tuple(state.to(options["storage_dtype"]) for state in exact.states)
        return replace(exact, states=stored)


class FreshChildren(OptimizedImplementation):
    """Every granularity draws children of its own."""

    def singular_rollout(self, family, model, prompts, condition, noise, **options):
        members = {}
        for granularity in family.granularities:
            own = RenamedNoise(noise, lambda depth, nodes, g=granularity: nodes + 10 * g if depth else nodes)
            single = replace(family, granularities=(granularity,))
            members |= super().singular_rollout(single, model, prompts, condition, own, **options)
        return members


def noise_statistics(implementation):
    source = KeyedNoise(3)
    return noise.branch_noise_findings(Subject(implementation), source, "fault", size=SIZE, dtype=torch.float64)


def exact_laws(implementation):
    return laws.response_findings(Subject(implementation), PLAN, "fault")


def grown(implementation, draws=None, plan=PLAN):
    model = Elementwise()
    return Subject(implementation).grow(plan, model, KeyedNoise(5), numbered_prompts(2), draws), model


def on_policy(implementation):
    draws = Draws((3,), torch.float64, torch.bfloat16)
    trace, model = grown(implementation, draws)
    return rollout.edge_findings(Subject(implementation), trace, model, draws)


def rewards_of(trace):
    generator = torch.Generator().manual_seed(1)
    shape = (len(trace.prompts), trace.plan.roots * trace.plan.leaves, 1)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def fused(implementation):
    trace, _ = grown(OptimizedImplementation())
    return values.fusion_as_defined(Subject(implementation), trace, rewards_of(trace), Fusion())


def normalised(implementation):
    trace, _ = grown(OptimizedImplementation())
    levels = OptimizedImplementation().fuse(trace, rewards_of(trace), Fusion())
    return values.normalised_as_defined(Subject(implementation), PLAN, levels, (1.0,), Normalization())


@contextmanager
def untyped():
    """Shape checks off, as in `properties/`: one a draw of four thousand prompts would be most of the time."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def z_scores(implementation):
    plan, reward = tree_plan(3, SDE, splits=(0, 1), branching=2, spread=4.0), linear_reward(np.array([-1.3]))
    with untyped():
        return z_scored.z_scored_findings(Subject(implementation), plan, reward, "depth_mean", "fault")


def update(implementation):
    model = Network((2,), 4)
    subject = Subject(implementation)
    trace = subject.grow(PLAN, model, KeyedNoise(6), numbered_prompts(2), Draws((2,)))
    generator = torch.Generator().manual_seed(2)
    levels = tuple(torch.randn(s.shape[:2], generator=generator, dtype=torch.float64) for s in trace.states)
    kept = subject.implementation.prune(PLAN, levels[-1], (DepthWindow(2, 1),), 0)
    return subject, objective.Case(trace, model, levels, kept, Objective())


def parity(implementation):
    return objective.gradient_parity(*update(implementation), "fault")


def edgewise(implementation):
    subject, case = update(implementation)
    return objective.edgewise_parity(subject, case, [(0, 0), (1, 1), (2, 0)], "fault")


def sharing(implementation):
    family = PlanFamily(shifted_schedule(5), Kernel(KernelKind.FLOW_SDE, 0.7), (0, 1), group=2, granularities=(1, 2))
    subject = Subject(implementation)
    members = subject.grow_family(family, Elementwise(), KeyedNoise(7), numbered_prompts(2))
    return singular.sharing_findings(subject, family, members)


CASES = [
    (SkippedShared, noise_statistics, "split: variance"),
    (SkippedShared, noise_statistics, "siblings: correlation"),
    (SkippedShared, exact_laws, "linear forms"),
    (PrivateOnly, noise_statistics, "siblings: correlation"),
    (PrivateOnly, exact_laws, "leaf covariances"),
    (SharedAcrossParents, noise_statistics, "parents: correlation"),
    (SharedAcrossParents, exact_laws, "level covariances"),
    (SharedAcrossPrompts, noise_statistics, "prompts: correlation"),
    (WrongStd, on_policy, "ratio 1 on policy"),
    (ForgottenRounding, on_policy, "ratio 1 on policy"),
    (WrongLeaf, fused, "as defined"),
    (WrongSet, normalised, "as defined"),
    (PopulationStd, z_scores, "z-scores"),
    (BatchStd, z_scores, "z-scores"),
    (SiblingScores, z_scores, "z-scores"),
    (OnePercent, z_scores, "z-scores"),
    (Leak, parity, "gradient parity"),
    (Leak, edgewise, "leak nothing"),
    (SlightLeak, parity, "gradient parity"),
    (SlightLeak, edgewise, "leak nothing"),
    (FreshChildren, sharing, "shared anchor and children"),
]


@pytest.mark.parametrize(("fault", "check", "row"), CASES, ids=lambda part: getattr(part, "__name__", part))
def test_the_fault_is_caught(fault, check, row):
    failed = [finding.name for finding in failures(check(fault()))]
    assert any(row in name for name in failed), failed


CHECKS = sorted({check for _, check, _ in CASES}, key=lambda check: check.__name__)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_right_implementation_passes(check):
    assert not [str(finding) for finding in failures(check(OptimizedImplementation()))]
