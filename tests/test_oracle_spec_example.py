"""The worked example and the stated numbers of spec/oracle.md."""

import ast

import numpy as np
import pytest
from helpers_oracle import DATA, make_plan

from branchgrpo.conformance.clauses import ROOT, clause
from branchgrpo.conformance.examples import load_examples
from branchgrpo.oracle.chain import affine_chain
from branchgrpo.oracle.covariance import Address, leaf_covariance, node_covariance
from branchgrpo.oracle.estimator import Estimator, expected_estimate, step_factors, step_weights
from branchgrpo.oracle.fusion import fusion_variance, fusion_variance_from_matrix, independent_leaves_variance
from branchgrpo.oracle.gaussian import noised_variance, velocity_intercept, velocity_slope
from branchgrpo.oracle.gradient import angle_degrees, mean_sensitivity, reward_gradient
from branchgrpo.oracle.laws import given_node, leaf_law, node_means, node_variances, random_root
from branchgrpo.oracle.pair import pair_edges, pair_effective_sample_size, pair_fusion_bias
from branchgrpo.oracle.reward import QuadraticReward, distance_reward, node_value, reward_covariance
from branchgrpo.oracle.sibling_variance import SiblingGroup, estimator_variance, rescaled_variance
from branchgrpo.oracle.zscore import zscore_factors
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput, Reduction

E = load_examples("oracle")
PLAN = Plan((1.0, 0.75, 0.5, 0.0), (Kernel(KernelKind.SDE, 0.5),) * 3, (2, 2, 1), (1.0,) * 3, output=LeafOutput.SAMPLE)
CHAIN, GIVEN, REWARD = affine_chain(PLAN, DATA), given_node(np.array([0.2])), distance_reward(np.array([1.0]))


def close(found, printed):
    # The page prints 12 to 17 digits; float64 keeps 16: what is left is the rounding of a few operations.
    np.testing.assert_allclose(np.ravel(found), np.ravel(printed), rtol=1e-12, atol=1e-14)


@clause("ORACLE-1", "ORACLE-2", "ORACLE-3")
def test_velocity_and_chain():
    e = E["velocity"]
    close(noised_variance(DATA, e["sigma"]), e["q"])
    close(velocity_slope(DATA, e["sigma"]), e["slope"])
    close(velocity_intercept(DATA, e["sigma"]), e["intercept"])
    for name, values in E["chain"].items():
        close(getattr(CHAIN, name), values)


@clause("ORACLE-4", "ORACLE-6", "ORACLE-7")
def test_laws_and_covariances():
    for start, name in ((random_root(), "random_root"), (GIVEN, "given_root")):
        close(node_means(CHAIN, start), E[name]["means"])
        close(node_variances(CHAIN, start), E[name]["variances"])
    e = E["given_root"]
    close([leaf_covariance(PLAN, CHAIN, GIVEN, j) for j in (0, 1)], e["leaf_covariances"])
    for node, name in ((0, "parent_and_leaf"), (1, "uncle_and_leaf")):
        close(node_covariance(PLAN, CHAIN, GIVEN, Address(1, node), Address(3, 0)), e[name])


@clause("ORACLE-9", "ORACLE-10", "ORACLE-11", "ORACLE-12")
def test_reward_and_fusion():
    e, (mean, variance) = E["reward"], leaf_law(CHAIN, GIVEN)
    close(node_value(CHAIN, REWARD, GIVEN), e["value"])
    close(reward_covariance(REWARD, mean, mean, variance), e["variance"])
    close(
        [reward_covariance(REWARD, mean, mean, c) for c in E["given_root"]["leaf_covariances"]], e["leaf_covariances"]
    )
    close(fusion_variance(PLAN, CHAIN, REWARD, GIVEN), e["fused_variance"])
    close(fusion_variance_from_matrix(PLAN, CHAIN, REWARD, GIVEN), e["fused_variance"])
    close(e["fused_variance"] / independent_leaves_variance(PLAN, CHAIN, REWARD, GIVEN), e["over_independent"])


@clause("ORACLE-13", "ORACLE-14", "ORACLE-15", "ORACLE-16", "ORACLE-17", "ORACLE-23")
def test_gradient_and_estimators():
    close(mean_sensitivity(CHAIN, GIVEN), E["gradient"]["sensitivity"])
    gradient = reward_gradient(CHAIN, REWARD, GIVEN)
    close(gradient, E["gradient"]["gradient"])
    for baseline in ("none", "group_mean", "leave_one_out", "sibling_mean"):
        close(step_factors(PLAN, Estimator(baseline)), E["factors"][baseline])
    close(zscore_factors(PLAN, CHAIN, GIVEN), E["factors"]["zscore"])
    for reduction in ("edge_mean", "depth_mean"):
        e = E[reduction]
        close(step_weights(PLAN, CHAIN, reduction), e["weights"])
        close(step_weights(PLAN, CHAIN, reduction, "std"), e["std_weights"])
        estimate = expected_estimate(PLAN, CHAIN, REWARD, GIVEN, Estimator("group_mean", reduction))
        close(estimate, e["group_mean"])
        close(angle_degrees(estimate, gradient), e["angle"])


@clause("ORACLE-18", "ORACLE-19", "ORACLE-20")
def test_pair():
    e, edges, concave = E["pair"], pair_edges(PLAN, CHAIN, 1), QuadraticReward(-np.ones(4), np.zeros(4))
    close(edges.contrast, e["contrast"])
    close(edges.leaf_gain, e["leaf_gain"])
    for reduction in Reduction:
        close(pair_effective_sample_size(edges, 4, 1.0, reduction), e[f"{reduction.value}_size"])
        close(pair_fusion_bias(edges, concave, 4, 1.0, reduction), e[f"{reduction.value}_bias"])


@clause("ORACLE-22")
@pytest.mark.parametrize("baseline", ["none", "group_mean", "leave_one_out"])
def test_siblings(baseline):
    group = SiblingGroup(factor=3, rho=0.25, elements=4, slope=1.0, offset=0.5, residual=0.2)
    close([estimator_variance(group, baseline), rescaled_variance(group, baseline)], E["siblings"][baseline])


@clause("ORACLE-17")
def test_no_estimator_comes_closer_to_the_whole_gradient_under_denoised():
    plan = make_plan(output="denoised")
    sensitivity = mean_sensitivity(affine_chain(plan, DATA), random_root())
    missing = np.degrees(np.arcsin(abs(sensitivity[-1]) / np.linalg.norm(sensitivity)))
    assert missing == pytest.approx(32.478, abs=5e-4)


@clause("ORACLE-3")
def test_the_oracle_takes_only_plan_types_and_errors():
    allowed = {f"branchgrpo.reference.{name}" for name in ("plan", "types", "errors")}
    files = sorted((ROOT / "reference/branchgrpo/oracle").glob("*.py"))
    assert len(files) > 10
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
        names += [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
        ours = {n for n in names if n.startswith("branchgrpo")}
        assert {n for n in ours if not n.startswith("branchgrpo.oracle")} <= allowed, file.name
        # What the plan derives (effective kernels, level sizes, trainable steps) is recomputed here, not read.
        attributes = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        derived = {
            "effective_kernels",
            "stochastic_steps",
            "trainable_steps",
            "level_sizes",
            "leaves",
            "deltas",
            "is_stochastic",
        }
        assert not attributes & derived, file.name
