"""Leaves of full-size rollouts against their exact laws: marginals, covariances by depth of parting, given a node."""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float64

from branchgrpo.oracle.chain import Chain, affine_chain
from branchgrpo.oracle.covariance import leaf_covariance, leaf_parting_depths
from branchgrpo.oracle.laws import given_node, leaf_law, random_root
from branchgrpo.properties.checks.laws import DATA, gaussian_model
from branchgrpo.properties.exact import as_array
from branchgrpo.properties.findings import Finding
from branchgrpo.properties.samples import leaves, standardised
from branchgrpo.properties.statistics.correlation import correlation_test
from branchgrpo.properties.statistics.ks import ks_test
from branchgrpo.properties.statistics.mean import mean_test
from branchgrpo.properties.statistics.variance import variance_test
from branchgrpo.properties.subject import Draws, Subject, numbered_prompts
from branchgrpo.reference.implementation import Trace
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseSource

Array = Float64[np.ndarray, "..."]

PROMPTS = 8
FULL_ELEMENTS = 48_000
"""D at full size: 8 prompts × D = 3.8·10⁵ independent values of one leaf, for 3 % of a variance and 0.015 σ."""


def leaf_trace(subject: Subject, plan: Plan, source: NoiseSource, size: int) -> Trace:
    """A rollout with the exact velocity of ``DATA``."""
    with torch.no_grad():
        return subject.grow(plan, gaussian_model(subject, plan), source, numbered_prompts(PROMPTS), Draws((size,)))


def marginal_findings(trace: Trace, chain: Chain, name: str, whole_law: bool) -> Iterator[Finding]:
    """The last leaf of every prompt: mean, variance, and on demand the whole law."""
    mean, variance = leaf_law(chain, random_root())
    one = standardised(leaves(trace)[:, -1], float(mean[0]), variance)
    yield mean_test(one).finding(f"{name}, leaf", "KERN-2 KERN-3 KERN-4 NOISE-2")
    yield variance_test(one).finding(f"{name}, leaf", "KERN-5 NOISE-2")
    if whole_law:
        yield ks_test(one).finding(f"{name}, leaf", "NOISE-2")


def covariance_findings(trace: Trace, chain: Chain, name: str) -> Iterator[Finding]:
    """Correlation of two leaves that part at each split in turn."""
    plan, start = trace.plan, random_root()
    mean, variance = leaf_law(chain, start)
    parting, states = leaf_parting_depths(plan), leaves(trace)
    for depth in plan.splits:
        a, b = (int(i) for i in np.argwhere(parting == depth)[0])
        x, y = (standardised(states[:, leaf], float(mean[0]), variance) for leaf in (a, b))
        rho = leaf_covariance(plan, chain, start, depth) / variance
        yield correlation_test(x, y, rho).finding(f"{name}, leaves parting at {depth}", "NOISE-1")


def given_node_findings(trace: Trace, chain: Chain, name: str, depth: int) -> Iterator[Finding]:
    """The first leaf under the first node of a depth, less its mean given that node's state."""
    node = as_array(trace.states[depth])[:, 0]
    centre, variance = leaf_law(chain, given_node(np.zeros(1), depth))
    gain = float(np.prod(chain.alpha[depth:]))
    deviation = (leaves(trace)[:, 0] - gain * node - float(centre[0])).reshape(-1)
    one = standardised(deviation, 0.0, variance)
    yield mean_test(one).finding(f"{name}, leaf given a node of depth {depth}", "ROLL-1 NOISE-3")
    yield variance_test(one).finding(f"{name}, leaf given a node of depth {depth}", "ROLL-1 NOISE-3")


def leaf_findings(
    subject: Subject, plan: Plan, source: NoiseSource, title: str, size: int, *, whole_law: bool = False
) -> list[Finding]:
    """Marginals of a plan's leaves, and for plans with splits the covariances and a conditional law.

    Args:
        subject: the implementation.
        plan: one root.
        source: noise source.
        title: for the table.
        size: D.
        whole_law: a Kolmogorov–Smirnov test beside the moments.
    """
    chain, name = affine_chain(plan, DATA), f"{subject.name}, {title}"
    trace = leaf_trace(subject, plan, source, size)
    found = list(marginal_findings(trace, chain, name, whole_law))
    if plan.splits:
        found += covariance_findings(trace, chain, name)
        found += given_node_findings(trace, chain, name, plan.splits[-1])
    return found
