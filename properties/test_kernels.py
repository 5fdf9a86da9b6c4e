"""Steps, log-probabilities and branch noise as their clauses define them, and the order of convergence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from branchgrpo.conformance.clauses import clause
from branchgrpo.properties import strategies
from branchgrpo.properties.checks.convergence import convergence_findings
from branchgrpo.properties.checks.rollout import branch_noise_definition, log_density_findings, steps_as_defined
from branchgrpo.properties.subject import Draws
from branchgrpo.reference.types import ODE, Kernel, KernelKind, Reduction

pytestmark = pytest.mark.quick


@clause("KERN-1", "KERN-2", "KERN-3", "KERN-4", "KERN-5")
@given(data=st.data())
def test_steps_are_as_defined(subject, judge, data):
    state, velocity = (data.draw(strategies.latents((4, 3))) for _ in range(2))
    judge(steps_as_defined(subject, data.draw(strategies.plans()), state, velocity))


@clause("LOGP-1", "LOGP-2", "LOGP-5")
@pytest.mark.parametrize("reduction", list(Reduction))
@given(
    seed=strategies.seeds,
    std=st.sampled_from([1.0, 0.03, 2.5]),
    storage=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_log_probability_is_the_normal_density(subject, judge, reduction, seed, std, storage):
    judge(log_density_findings(subject, seed, std, Draws((3, 2), storage_dtype=storage, reduction=reduction)))


@clause("NOISE-1", "NOISE-2")
@given(spread=st.one_of(strategies.spreads, st.floats(0.0, 1e300)), seed=strategies.seeds)
def test_branch_noise_is_as_defined(subject, judge, spread, seed):
    judge(branch_noise_definition(subject, spread, seed))


@clause("KERN-2", "KERN-3")
@pytest.mark.parametrize(("title", "kernel"), [("ODE", ODE), ("constant g = 0.3", Kernel(KernelKind.SDE, 0.3))])
def test_kernels_that_keep_the_marginals_converge_to_first_order(subject, judge, title, kernel):
    judge(convergence_findings(subject, kernel, title))
