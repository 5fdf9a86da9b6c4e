"""Fusion and gradient estimators: expectations exact by cubature, sums over real samples by their exact law."""

import math

import numpy as np
import pytest

from branchgrpo.conformance.clauses import clause
from branchgrpo.oracle.reward import QuadraticReward, linear_reward
from branchgrpo.properties.checks import estimators as checks
from branchgrpo.properties.checks import z_scored
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.types import Kernel, KernelKind

pytestmark = pytest.mark.quick

SDE = Kernel(KernelKind.SDE, 0.6)
PLANS = {
    "one split": tree_plan(3, SDE, splits=(0,), branching=2, spread=2.0),
    "late split": tree_plan(3, Kernel(KernelKind.FLOW_SDE, 0.7), splits=(1,), branching=2, spread=1.0),
}
REWARDS = {
    "concave reward": QuadraticReward(np.array([-0.8]), np.array([0.5]), 0.2),
    "convex reward": QuadraticReward(np.array([0.6]), np.array([-0.3]), 0.0),
}
FLOW = Kernel(KernelKind.FLOW_SDE, 0.7)
CONTRASTS = {
    "two nodes": tree_plan(3, FLOW, splits=(0,), branching=2, spread=1.0),
    "three nodes": tree_plan(2, SDE, splits=(0,), branching=3, spread=2.0),
    "late split of three": tree_plan(4, FLOW, splits=(1,), branching=3, spread=1.0),
    "two and four nodes": tree_plan(4, SDE, splits=(0, 1), branching=2, spread=2.0),
    "four siblings": tree_plan(3, SDE, splits=(0,), branching=4, spread=math.inf),
}
SLOPE = linear_reward(np.array([-1.3]))
LARGE = tree_plan(4, SDE, splits=(0, 1), branching=2, spread=2.0)
TREES = 4000


@clause("FUSE-1", "FUSE-6", "ORACLE-11")
@pytest.mark.parametrize(("plan", "reward"), [("late split", "concave reward"), ("one split", "convex reward")])
def test_uniform_fusion_is_unbiased_with_its_exact_variance(subject, judge, plan, reward):
    judge(checks.fusion_findings(subject, PLANS[plan], REWARDS[reward], f"{plan}, {reward}"))


@clause("OBJ-1", "OBJ-4", "OBJ-7", "ORACLE-14", "ORACLE-15", "ORACLE-16")
@pytest.mark.parametrize("reduction", ["edge_mean", "depth_mean"])
def test_expected_gradients_are_those_of_the_oracle(subject, judge, reduction):
    judge(checks.gradient_findings(subject, PLANS["late split"], REWARDS["concave reward"], reduction, "late split"))


@clause("OBJ-1", "OBJ-4", "OBJ-7", "ORACLE-14", "ORACLE-15", "ORACLE-16")
@pytest.mark.parametrize("reduction", ["edge_mean", "depth_mean"])
def test_expected_gradients_of_several_noisy_depths(sampler, judge, reduction):
    judge(checks.gradient_findings(sampler, PLANS["one split"], REWARDS["convex reward"], reduction, "one split"))


@clause("NORM-1", "NORM-3", "OBJ-1", "OBJ-4", "OBJ-7", "ORACLE-23")
@pytest.mark.parametrize("reduction", ["edge_mean", "depth_mean"])
@pytest.mark.parametrize("plan", ["two nodes", "three nodes"])
def test_expected_gradients_with_z_scores(subject, judge, reduction, plan):
    judge(z_scored.z_scored_findings(subject, CONTRASTS[plan], SLOPE, reduction, plan))


@clause("NORM-1", "NORM-3", "OBJ-1", "OBJ-4", "OBJ-7", "ORACLE-23")
@pytest.mark.parametrize("reduction", ["edge_mean", "depth_mean"])
@pytest.mark.parametrize("plan", ["late split of three", "two and four nodes", "four siblings"])
def test_expected_gradients_with_z_scores_of_several_depths(sampler, judge, reduction, plan):
    judge(z_scored.z_scored_findings(sampler, CONTRASTS[plan], SLOPE, reduction, plan))


@clause("OBJ-1", "OBJ-4", "OBJ-7", "ORACLE-14", "ORACLE-15")
@pytest.mark.parametrize("baseline", checks.BASELINES)
def test_gradient_estimators_follow_their_exact_law(sampler, seed, scale, judge, baseline):
    trees = max(200, int(TREES * scale))
    judge([checks.estimator_statistic(sampler, LARGE, KeyedNoise(seed + 2), baseline, trees, "two splits")])


@clause("FUSE-6", "ORACLE-11")
def test_uniform_fusion_follows_its_exact_law(sampler, seed, scale, judge):
    trees = max(200, int(TREES * scale))
    judge(checks.fusion_statistics(sampler, LARGE, KeyedNoise(seed + 3), trees, "two splits"))
