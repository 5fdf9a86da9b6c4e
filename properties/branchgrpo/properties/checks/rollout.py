"""Rollouts: sizes, realised actions, ratio 1 on policy, and independence of batch, order and chunk."""

import math
from collections.abc import Sequence

import torch
from scipy import stats
from torch import Tensor

from branchgrpo.models.gaussian import ExactGaussian
from branchgrpo.oracle.chain import step_coefficients
from branchgrpo.properties.checks.equivalence import trace_findings
from branchgrpo.properties.checks.laws import DATA
from branchgrpo.properties.checks.values import leaf_permutation, permuted
from branchgrpo.properties.exact import all_close, as_array, at_most, holds
from branchgrpo.properties.findings import Finding
from branchgrpo.properties.networks import Elementwise
from branchgrpo.properties.objective_definition import step_terms
from branchgrpo.properties.sources import RenamedNoise
from branchgrpo.properties.subject import Draws, Subject, all_kept
from branchgrpo.properties.tolerances import EXACT, PARITY, ratio
from branchgrpo.reference.implementation import Trace
from branchgrpo.reference.options import Objective
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import NoiseSource, Prompt, VelocityModel


def counts_findings(subject: Subject, trace: Trace) -> list[Finding]:
    """n_0 = 1, n_{d+1} = n_d·K_d, for every root; a log-probability where std > 0 and nowhere else (PLAN-4, LOGP-4)."""
    plan, prompts = trace.plan, len(trace.prompts)
    sizes = [plan.roots * math.prod(plan.branching[:d]) for d in range(plan.steps + 1)]
    shapes = [tuple(state.shape[:2]) == (prompts, n) for state, n in zip(trace.states, sizes, strict=True)]
    means = [mean.shape == state.shape for mean, state in zip(trace.means, trace.states[1:], strict=True)]
    noisy = [std > 0.0 for std in trace.stds.tolist()]
    gaps = [(edges is not None) == on for edges, on in zip(trace.log_probs, noisy, strict=True)]
    last = plan.output != "denoised" or not noisy[-1]
    name = f"{subject.name}, rollout"
    return [
        holds(f"{name}: level sizes", "PLAN-4 ROLL-1", [*shapes, *means]),
        holds(f"{name}: log-probabilities at stochastic steps only", "LOGP-4 KERN-5", gaps),
        holds(f"{name}: a denoised leaf has no noise of its own", "PLAN-6 ROLL-6", [last]),
    ]


def kernel_std(plan: Plan, step: int) -> float:
    """The oracle's std of a step."""
    return step_coefficients(plan.kernels[step], plan.sigmas[step], plan.sigmas[step + 1], plan.sigmas[1])[2]


def edge_findings(subject: Subject, trace: Trace, model: VelocityModel, draws: Draws) -> list[Finding]:
    """Ratio 1 on policy: log p recomputed at the stored states, for every storage dtype (LOGP-3, ROLL-5, OBJ-1).

    Also: deterministic children are the mean as stored, and stds are the kernels'.
    """
    plan, worst, conditions, count = trace.plan, 0.0, [], 0
    for step in range(plan.steps):
        edges = trace.log_probs[step]
        if edges is None:
            conditions.append(torch.equal(trace.states[step + 1], trace.means[step].to(draws.storage_dtype)))
            continue
        with torch.no_grad():
            found = step_terms(trace, step, model, None, draws.reduction).ratio
        worst = max(worst, float((found - 1.0).abs().max()))
        count += edges.numel()
    stds = [abs(float(trace.stds[i]) - kernel_std(plan, i)) for i in plan.stochastic_steps]
    name = f"{subject.name}, {str(draws.storage_dtype).removeprefix('torch.')} storage"
    tolerance = ratio(draws.dtype, conditioning(trace), int(torch.tensor(draws.latent_shape).prod()), draws.reduction)
    return [
        at_most(f"{name}: ratio 1 on policy", "LOGP-3 ROLL-3 ROLL-5 OBJ-1", worst, tolerance, max(count, 1)),
        holds(f"{name}: deterministic children are the mean", "KERN-5 ROLL-1", conditions),
        at_most(f"{name}: stds", "KERN-5", max(stds, default=0.0), PARITY, max(1, len(stds))),
    ]


def conditioning(trace: Trace) -> float:
    """Largest |mean|/std over the stochastic steps: how much rounding of a mean grows in z."""
    return max([1.0] + [float(trace.means[i].abs().max()) / float(trace.stds[i]) for i in trace.plan.stochastic_steps])


def on_policy_value(subject: Subject, trace: Trace, model: VelocityModel, draws: Draws) -> list[Finding]:
    """On policy J is the mean of A over each tree's edges: 1 for A = 1 (OBJ-1, OBJ-7)."""
    ones = tuple(torch.ones(level.shape[:2], dtype=torch.float64, device=level.device) for level in trace.states)
    kept = all_kept(trace.plan, len(trace.prompts))
    value = float(subject.objective(trace, model, ones, kept, Objective(), draws.reduction).detach())
    tolerance = ratio(draws.dtype, conditioning(trace), int(torch.tensor(draws.latent_shape).prod()), draws.reduction)
    return [at_most(f"{subject.name}: J on policy is mean A", "OBJ-1 OBJ-7", abs(value - 1.0), tolerance)]


def rows_of(trace: Trace, rows: Sequence[int]) -> Trace:
    """The trace of some prompts of a batch."""
    index = torch.tensor(rows)

    def pick(levels: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(level[index.to(level.device)] for level in levels)

    scores = tuple(None if edges is None else edges[index.to(edges.device)] for edges in trace.log_probs)
    prompts = tuple(trace.prompts[i] for i in rows)
    return Trace(trace.plan, prompts, pick(trace.states), pick(trace.means), trace.stds, scores)


def prompt_order(
    subject: Subject, plan: Plan, source: NoiseSource, prompts: Sequence[Prompt], order: Sequence[int]
) -> list[Finding]:
    """Re-ordering prompts re-orders a rollout; a prompt alone grows as it does in a batch (ROLL-2, NOISE-4)."""
    model = Elementwise().to(subject.device)
    whole = subject.grow(plan, model, source, prompts)
    moved = subject.grow(plan, model, source, [prompts[i] for i in order])
    alone = subject.grow(plan, model, source, [prompts[order[0]]])
    name = subject.name
    return [
        *trace_findings(f"{name}, prompts re-ordered", moved, rows_of(whole, order), PARITY),
        *trace_findings(f"{name}, one prompt alone", alone, rows_of(whole, order[:1]), PARITY),
    ]


def sibling_order(
    subject: Subject, plan: Plan, source: NoiseSource, prompts: Sequence[Prompt], step: int, order: Sequence[int]
) -> list[Finding]:
    """Siblings that swap their draws (and those of all below them) swap their subtrees (ROLL-1, NOISE-3)."""
    model = Elementwise().to(subject.device)
    index = [torch.from_numpy(leaf_permutation(plan, step, order, depth)) for depth in range(plan.steps + 1)]
    renamed = RenamedNoise(source, lambda depth, nodes: index[depth][nodes.cpu()].to(nodes.device))
    base = subject.grow(plan, model, source, prompts)
    moved = subject.grow(plan, model, renamed, prompts)
    expected = [permuted(level, plan, at.numpy()) for level, at in zip(base.states, index, strict=True)]
    return [
        all_close(f"{subject.name}, siblings swapped: states follow", "ROLL-1 NOISE-3", moved.states, expected, PARITY)
    ]


def repeatability(subject: Subject, plan: Plan, source: NoiseSource, prompts: Sequence[Prompt]) -> list[Finding]:
    """The same arguments give the same bits, the global generator is neither read nor moved (ROLL-2)."""
    model = ExactGaussian(DATA.mean, DATA.tau).to(subject.device)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = subject.grow(plan, model, source, prompts)
    untouched = torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second = subject.grow(plan, model, source, prompts)
    same = [torch.equal(a, b) for a, b in zip(first.states, second.states, strict=True)]
    free = [not level.requires_grad for level in first.states]
    return [holds(f"{subject.name}, rollout: a function of its arguments", "ROLL-2", [untouched, *same, *free])]


def iteration_matters(subject: Subject, plan: Plan, source: NoiseSource, prompts: Sequence[Prompt]) -> list[Finding]:
    """Another iteration draws other noise; prompts do not share theirs (NOISE-4)."""
    model = Elementwise().to(subject.device)
    first, second = (subject.grow(plan, model, source, prompts, Draws(iteration=i)).states[0] for i in (0, 1))
    fresh = not torch.equal(first, second)
    apart = len({tuple(row.flatten().tolist()) for row in first.flatten(0, 1)}) == first.shape[0] * first.shape[1]
    return [holds(f"{subject.name}, noise: keyed by iteration, prompt and root", "NOISE-4 ROLL-1", [fresh, apart])]


def steps_as_defined(subject: Subject, plan: Plan, state: Tensor, velocity: Tensor) -> list[Finding]:
    """Mean and std of every step at a state with a velocity, against the oracle's coefficients (KERN-1 … KERN-5)."""
    x, v = state.to(subject.device), velocity.to(subject.device)
    size = float(torch.maximum(x.abs().max(), v.abs().max()))
    found, expected, stds = [], [], []
    kernels = plan.effective_kernels
    for i in range(plan.steps):
        mean, std = subject.implementation.transition(plan, i, x, v)
        a, b, exact = step_coefficients(kernels[i], plan.sigmas[i], plan.sigmas[i + 1], plan.sigmas[1])
        exact = exact if i in plan.stochastic_steps else 0.0
        found.append(mean)
        expected.append(a * x + b * v)
        stds.append(abs(std - exact))
    name = f"{subject.name}, steps"
    clause = "KERN-1 KERN-2 KERN-3 KERN-4"
    return [
        all_close(f"{name}: means as defined", clause, found, expected, PARITY, size),
        at_most(f"{name}: stds as defined", "KERN-5", max(stds), PARITY, plan.steps),
    ]


def log_density_findings(subject: Subject, seed: int, std: float, draws: Draws) -> list[Finding]:
    """Log-probability against scipy's normal density, in both reductions (LOGP-1, LOGP-2, LOGP-5)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (5, *draws.latent_shape)
    mean = torch.randn(shape, generator=generator, dtype=torch.float64).to(draws.dtype)
    child = (mean + std * torch.randn(shape, generator=generator, dtype=torch.float64)).to(draws.storage_dtype)
    elements = stats.norm.logpdf(as_array(child), as_array(mean), std).reshape(5, -1)
    expected = elements.sum(axis=1) if draws.reduction == "sum" else elements.mean(axis=1)
    found = subject.implementation.log_probability(
        child.to(subject.device), mean.to(subject.device), std, draws.reduction
    )
    name = f"{subject.name}, log-probability: {draws.reduction}"
    return [all_close(name, "LOGP-1 LOGP-2 LOGP-5", [found], [expected], PARITY)]


def branch_noise_definition(subject: Subject, spread: float, seed: int) -> list[Finding]:
    """ξ = a ξ₀ + c η at any spread; equal siblings at s = 0, η itself at s = ∞ (NOISE-1, NOISE-2)."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(3, 4, generator=generator, dtype=torch.float64).to(subject.device)
    private = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64).to(subject.device)
    found = subject.implementation.branch_noise(shared, private, spread)
    angle = math.atan(spread)
    expected = math.cos(angle) * shared.unsqueeze(1) + math.sin(angle) * private
    name = f"{subject.name}, branch noise"
    rows = [all_close(f"{name}: as defined", "NOISE-1 NOISE-2", [found], [expected], PARITY)]
    if spread == 0.0:
        rows.append(holds(f"{name}: s = 0 makes siblings equal", "NOISE-2", [torch.equal(found[:, 0], found[:, 1])]))
    if math.isinf(spread):
        error = float((found - private).abs().max())
        rows.append(at_most(f"{name}: s = ∞ leaves the private draw", "NOISE-2", error, EXACT, private.numel()))
    return rows
