"""Third claim: the pruned gradient is Σ_kept g_e over the kept edges' normaliser, each g_e from the unpruned run."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from branchgrpo.conformance.clauses import clause
from branchgrpo.properties import strategies
from branchgrpo.properties.checks import objective as checks
from branchgrpo.properties.loading import load_object
from branchgrpo.properties.networks import Network
from branchgrpo.properties.objective_definition import trained_masks
from branchgrpo.properties.subject import Draws, offsets
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.protocols import Guidance
from branchgrpo.reference.types import Reduction

pytestmark = pytest.mark.quick

SHAPE = (2,)
VARIANTS = {
    "plain": {},
    "guidance": {"guidance": Guidance("classifier_free", 2.5)},
    "checkpointing": {"checkpointing": True},
    "guidance and checkpointing": {"guidance": Guidance("classifier_free", 2.5), "checkpointing": True},
}


@st.composite
def updates(draw, subject, variant, pruned=True, off_policy=True):
    """A rollout, a policy beside the one that made it, advantages, and masks that leave every tree an edge."""
    plan = draw(strategies.plans(max_steps=3, max_leaves=4, min_splits=1))
    prompts = draw(strategies.prompt_lists())
    seed = draw(strategies.seeds)
    reduction = draw(st.sampled_from(list(Reduction)))
    behaviour = Network(SHAPE, seed % 1000, **VARIANTS[variant]).to(subject.device)
    trace = subject.grow(plan, behaviour, KeyedNoise(seed), prompts, Draws(SHAPE, reduction=reduction))
    policy = Network(SHAPE, seed % 1000, **VARIANTS[variant]).to(subject.device)
    generator = torch.Generator().manual_seed(seed)
    if off_policy:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.0 + draw(st.sampled_from([1e-3, 1e-2])))
    levels = tuple(
        torch.randn(level.shape[:2], generator=generator, dtype=torch.float64).to(subject.device)
        for level in trace.states
    )
    rules = draw(strategies.pruning_rules(plan)) if pruned else ()
    keys = levels[-1]
    kept = subject.implementation.prune(plan, keys, rules, draw(st.integers(0, 6)))
    empty = [mask.any(dim=1) for mask in trained_masks(plan, kept).values()]
    if not empty or not bool(torch.stack(empty).any(dim=0).all()):
        kept = subject.implementation.prune(plan, keys, (), 0)
    return checks.Case(trace, policy, levels, kept, draw(strategies.objectives), reduction)


@clause("PRUNE-6", "OBJ-3", "OBJ-4", "ROLL-4")
@pytest.mark.parametrize("variant", list(VARIANTS))
@given(data=st.data())
def test_the_pruned_gradient_is_that_of_the_kept_edges(subject, judge, variant, data):
    judge(checks.gradient_parity(subject, data.draw(updates(subject, variant)), variant))


@clause("PRUNE-6", "OBJ-3")
@given(data=st.data())
def test_edge_by_edge(subject, judge, data):
    case = data.draw(updates(subject, "plain"))
    steps = list(case.trace.plan.trainable_steps)
    edges = []
    for _ in range(3):
        step = data.draw(st.sampled_from(steps))
        edges.append((step, data.draw(st.integers(0, case.advantages[step + 1].shape[1] - 1))))
    judge(checks.edgewise_parity(subject, case, edges, "edge by edge"))


@clause("OBJ-7")
@pytest.mark.parametrize("variant", ["plain", "guidance and checkpointing"])
@given(data=st.data())
def test_any_micro_batch_gives_the_same_gradient(optimized, judge, variant, data):
    case = data.draw(updates(optimized, variant))
    judge(checks.micro_batch_findings(optimized, case, accumulate, (1, 2, 3, 7)))


def accumulate(case, size):
    """Gradient of J over micro-batches of parents, by the optimized update."""
    to_tree = load_object("branchgrpo.conformance.adapters.optimized:to_tree")
    run = load_object("branchgrpo.optimized.update:accumulate_gradients")
    for parameter in case.parameters:
        parameter.grad = None
    stats = run(
        [to_tree(case.trace, case.reduction)],
        case.model,
        offsets(case.trace.prompts, case.trace.states[0].device),
        [case.advantages],
        [case.kept],
        case.options,
        micro_batch=size,
    )
    gradient = [torch.zeros_like(p) if p.grad is None else -p.grad for p in case.parameters]
    for parameter in case.parameters:
        parameter.grad = None
    return gradient, stats.objective
