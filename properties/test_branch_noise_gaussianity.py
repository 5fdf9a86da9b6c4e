"""First claim: branch noise is N(0, I) at every spread, with covariance I/(1 + s²) between siblings and no other."""

import math

import pytest
import torch

from branchgrpo.conformance.clauses import clause
from branchgrpo.properties.checks import noise as checks

pytestmark = pytest.mark.quick


@clause("NOISE-1", "NOISE-2", "NOISE-3", "NOISE-4", "NOISE-5")
def test_branch_noise_is_gaussian(sampler, source, scale, judge):
    title = f"{sampler.name}, {source.name} noise"
    size = checks.elements(scale)
    judge(checks.branch_noise_findings(sampler, source.noise, title, size=size, dtype=torch.float64))


@clause("NOISE-1", "NOISE-2")
@pytest.mark.parametrize("spread", [0.5, 1.0, math.inf])
def test_siblings_at_other_spreads(sampler, source, scale, judge, spread):
    title, size = f"{sampler.name}, {source.name} noise", checks.elements(scale, 22_000)
    judge(checks.sibling_findings(sampler, source.noise, title, spread=spread, size=size, dtype=torch.float64))


@clause("NOISE-4")
def test_iterations_are_independent(sampler, source, scale, judge):
    title, size = f"{sampler.name}, {source.name} noise", checks.elements(scale, 22_000)
    judge(checks.iteration_findings(sampler, source.noise, title, size=size))


@clause("NOISE-1", "NOISE-2")
def test_single_precision_siblings(sampler, source, scale, judge):
    title, size = f"{sampler.name}, {source.name} noise, float32", checks.elements(scale, 22_000)
    judge(checks.sibling_findings(sampler, source.noise, title, spread=4.0, size=size, dtype=torch.float32))
