"""Exact laws: the implementation's response to chosen noise against the oracle's recursion.

With affine dynamics every state is a linear form in the draws; a rollout whose prompt p gets the p-th unit vector as
noise reads the form off, and with it every marginal, covariance and conditional law, to rounding.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from branchgrpo.models.gaussian import ExactGaussian
from branchgrpo.oracle.chain import Chain, affine_chain
from branchgrpo.oracle.covariance import leaf_covariance_matrix
from branchgrpo.oracle.gaussian import GaussianData
from branchgrpo.oracle.laws import given_node, node_means, node_variances, random_root
from branchgrpo.oracle.propagation import level_covariances
from branchgrpo.properties.exact import all_close, as_array, close
from branchgrpo.properties.findings import Finding
from branchgrpo.properties.linear import LinearTree, linear_tree
from branchgrpo.properties.sources import ChosenNoise
from branchgrpo.properties.subject import Draws, Subject, numbered_prompts
from branchgrpo.properties.tolerances import LAW
from branchgrpo.reference.implementation import Trace
from branchgrpo.reference.plan import Plan

DATA = GaussianData(0.7, 0.5)
"""The data law of the checks: the oracle's example."""


@dataclass(frozen=True, eq=False)
class Response:
    """What a rollout does with unit noise.

    Attributes:
        trace: prompt p < P has the p-th unit vector as noise, prompt P none.
        states: depth 0 … T, ``[R·n_d, normals]``: the linear forms found.
        means: depth 0 … T, ``[R·n_d]``: the states without noise.
    """

    trace: Trace
    states: list[Float64[np.ndarray, "_ normals"]]
    means: list[Float64[np.ndarray, "_"]]


def gaussian_model(subject: Subject, plan: Plan, latent_shape: tuple[int, ...] | None = None) -> ExactGaussian:
    """The exact velocity of ``DATA``, with a θ a step if a latent shape is given."""
    sigmas = None if latent_shape is None else plan.sigmas
    return ExactGaussian(DATA.mean, DATA.tau, sigmas, latent_shape=latent_shape).to(subject.device)


def respond(subject: Subject, plan: Plan, expected: LinearTree) -> Response:
    """Roll out with unit noises."""
    count = len(expected.draws)
    points = np.concatenate([np.eye(count), np.zeros((1, count))])
    source = ChosenNoise(expected.draws, points)
    prompts = numbered_prompts(count + 1)
    trace = subject.grow(plan, gaussian_model(subject, plan), source, prompts, Draws((1,)))
    levels = [as_array(level)[..., 0] for level in trace.states]
    return Response(trace, [(level[:-1] - level[-1]).T for level in levels], [level[-1] for level in levels])


def response_findings(subject: Subject, plan: Plan, title: str) -> list[Finding]:
    """States, means, node variances and leaf covariances of a plan, all exact."""
    chain = affine_chain(plan, DATA)
    expected = linear_tree(plan, chain)
    found = respond(subject, plan, expected)
    name = f"{subject.name}, {title}"
    start = random_root()
    rows = [plan.roots * n for n in plan.level_sizes]
    centre = [np.full(n, m) for n, m in zip(rows, node_means(chain, start)[:, 0], strict=True)]
    spread = [np.full(n, v) for n, v in zip(rows, node_variances(chain, start), strict=True)]
    found_spread = [np.square(forms).sum(axis=1) for forms in found.states]
    return [
        all_close(f"{name}: linear forms", "ROLL-1 NOISE-1 NOISE-3", found.states, expected.states, LAW),
        all_close(f"{name}: node means", "KERN-2 KERN-3 KERN-4", found.means, centre, LAW),
        all_close(f"{name}: node variances", "KERN-5 NOISE-2", found_spread, spread, LAW),
        *covariance_findings(plan, chain, found, name),
        given_node_finding(plan, chain, found, name),
    ]


def covariance_findings(plan: Plan, chain: Chain, found: Response, name: str) -> list[Finding]:
    """Covariance of the first root's leaves by depth of parting, of every level, and between roots (none)."""
    start = random_root()
    own = [forms[:n] for forms, n in zip(found.states, plan.level_sizes, strict=True)]
    levels = [forms @ forms.T for forms in own]
    leaves = found.states[-1]
    across = leaves[: plan.leaves] @ leaves[plan.leaves :].T
    return [
        close(f"{name}: leaf covariances", "NOISE-1", levels[-1], leaf_covariance_matrix(plan, chain, start), LAW),
        all_close(f"{name}: level covariances", "NOISE-1", levels, level_covariances(plan, chain, start), LAW),
        close(f"{name}: roots are independent", "ROLL-1 NOISE-3", across, np.zeros_like(across), 0.0),
    ]


def given_node_finding(plan: Plan, chain: Chain, found: Response, name: str) -> Finding:
    """Leaves given the first node of the middle depth: covariance of what its own noises below it leave open."""
    depth = plan.steps // 2
    size = plan.leaves // plan.level_sizes[depth]
    leaves = found.states[-1][:size]
    node = found.states[depth][0]
    gain = float(np.prod(chain.alpha[depth:]))
    below = leaves - gain * node
    expected = leaf_covariance_matrix(plan, chain, given_node(np.zeros(1), depth))
    return close(f"{name}: leaves given a node", "NOISE-1", below @ below.T, expected, LAW)


def joint_law_findings(subject: Subject, wide: Plan, nested: Plan) -> list[Finding]:
    """Two plans with equal leaf laws and unequal joint ones: K = 4 in one split, and two splits of 2."""
    forms = [respond(subject, p, linear_tree(p, affine_chain(p, DATA))).states[-1] for p in (wide, nested)]
    first, second = (f @ f.T for f in forms)
    name = f"{subject.name}, K = 4 against 2 × 2"
    apart = float(np.abs(first - second).max())
    return [
        close(f"{name}: leaf variances agree", "NOISE-2", np.diag(first), np.diag(second), LAW),
        Finding(f"{name}: joint laws differ", "NOISE-1", first.size, float(apart <= LAW), tolerance=0.0),
    ]
