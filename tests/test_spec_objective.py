"""Clauses of spec/objective.md."""

import math
from dataclasses import replace

import pytest
import torch
from helpers_spec import (
    CONDITION,
    CPS,
    FLOW,
    PROMPT,
    SDE,
    Network,
    Scaled,
    Toy,
    build_tree,
    close,
    f64,
    load_examples,
    small_plan,
)

from branchgrpo.conformance.clauses import clause
from branchgrpo.reference.errors import InputError, OptionError, PlanError
from branchgrpo.reference.fusion import fuse
from branchgrpo.reference.kernels import transition
from branchgrpo.reference.log_probability import ratio
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.normalization import normalize
from branchgrpo.reference.objective import objective, reduce_edges, trainable_edges, update_stds
from branchgrpo.reference.options import DepthWindow, Fusion, Normalization, Objective
from branchgrpo.reference.presets import preset
from branchgrpo.reference.reward import score
from branchgrpo.reference.rollout import Sampling, rollout
from branchgrpo.reference.surrogate import clipped_surrogate, gaussian_kl, step_weights
from branchgrpo.reference.types import LeafOutput, Reduction

EXAMPLE = load_examples("objective")


def run(plan, *, reduction=Reduction.MEAN, storage=torch.float64, seed=0):
    """A tree rolled out by a network, with distinct advantages, and all its edges."""
    model = Network()
    sampling = Sampling(KeyedNoise(seed), (2, 3), storage_dtype=storage, reduction=reduction)
    (tree,) = rollout(plan, model, PROMPT, CONDITION, sampling)
    values = fuse(tree, score(tree, [Toy()]), Fusion())
    # z-scores of a depth add to 0, and a mean of them cannot tell a mean from a sum: every edge gets more of its own.
    z = normalize([tree], values, (1.0,), Normalization())
    advantages = {node: a + 0.3 + 0.1 * node.depth - 0.07 * node.index for node, a in z.items()}
    return model, tree, advantages, set(tree.edges())


def loss(tree, model, advantages, kept, options=None, reduction=Reduction.MEAN, frozen=None):
    options = Objective() if options is None else options
    return objective([tree], model, [CONDITION], advantages, kept, options, reduction, frozen)


def number(value):
    return value.detach().item()


def moved(model, by=0.02):
    """A network with other weights."""
    other = Network()
    waves = {name: torch.sin(torch.arange(p.numel())).view_as(p) for name, p in model.state_dict().items()}
    other.load_state_dict({name: p + by * waves[name] for name, p in model.state_dict().items()})
    return other


@clause("OBJ-2")
def test_the_example_surrogate():
    e = EXAMPLE["surrogate"]
    terms = clipped_surrogate(f64(e["rho"]), f64(e["advantages"]), e["clip_low"], e["clip_high"])
    close(terms, e["terms"])


@clause("OBJ-4")
def test_the_example_reductions():
    e = EXAMPLE["surrogate"]
    tree = build_tree(small_plan((0,), steps=2, branching=1))
    nodes = [replace(tree.level(1)[0], depth=d, index=i) for i, d in enumerate(e["depths"])]
    terms = dict(zip(nodes, f64(e["terms"]), strict=True))
    close(reduce_edges(terms, "edge_mean"), e["edge_mean"])
    close(reduce_edges(terms, "depth_mean"), e["depth_mean"])


@clause("OBJ-5")
def test_the_example_kl():
    e = EXAMPLE["kl"]
    for reduction, key in ((Reduction.SUM, "sum"), (Reduction.MEAN, "reduced_mean")):
        close(gaussian_kl(f64(e["mean"]), f64(e["mean_ref"]), e["std"], reduction), e[key])
    normal = torch.distributions.Normal
    exact = torch.distributions.kl_divergence(normal(f64(e["mean"]), e["std"]), normal(f64(e["mean_ref"]), e["std"]))
    close(exact.sum(), e["sum"])


@clause("OBJ-6")
def test_the_example_weights():
    e = EXAMPLE["weights"]
    stds = dict(zip(e["steps"], e["stds"], strict=True))
    assert list(step_weights(stds, "std").values()) == pytest.approx(e["weights"], rel=1e-14)
    assert set(step_weights(stds, "uniform").values()) == {1.0}


@clause("OBJ-2", "ERR-5")
def test_clipping_is_one_sided_in_the_direction_of_the_advantage():
    rho = f64([0.5, 0.95, 1.05, 2.0])
    close(clipped_surrogate(rho, f64([1.0] * 4), 0.1, 0.2), [0.5, 0.95, 1.05, 1.2])
    close(clipped_surrogate(rho, f64([-1.0] * 4), 0.1, 0.2), [-0.9, -0.95, -1.05, -2.0])
    for field in ("clip_low", "clip_high"):
        for value in (0.0, -1.0, math.nan, math.inf):
            with pytest.raises(OptionError, match=f"objective.{field}"):
                Objective(**{field: value})


@clause("OBJ-1", "LOGP-3", "LOGP-2")
@pytest.mark.parametrize("storage", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", Reduction)
def test_on_policy_the_objective_is_the_mean_advantage_and_its_gradient_the_policy_gradient(storage, reduction):
    model, tree, advantages, kept = run(small_plan((0,)), storage=storage, reduction=reduction)
    value = loss(tree, model, advantages, kept, reduction=reduction)
    edges = trainable_edges(tree, kept)
    close(value, float(torch.stack([advantages[e] for e in edges]).mean()))
    close(ratio(f64([0.5, 0.0]), f64([0.5, -math.log(2.0)])), [1.0, 2.0])


@clause("OBJ-1", "OBJ-7")
def test_old_log_probabilities_stay_those_of_the_rollout():
    model, tree, advantages, kept = run(small_plan((0,)))
    other = moved(model)
    wide = Objective(clip_low=0.999, clip_high=1e9)
    once = loss(tree, other, advantages, kept, wide)
    assert not torch.allclose(once, loss(tree, model, advantages, kept, wide), rtol=1e-6)
    assert torch.equal(loss(tree, other, advantages, kept, wide), once)
    assert all(e.log_prob is None or not e.log_prob.requires_grad for e in tree.edges())
    assert not any(a.requires_grad for a in advantages.values())


@clause("OBJ-3", "PLAN-6")
def test_edges_in_the_loss_are_kept_and_trainable_and_may_have_zero_advantage():
    plan = small_plan((0,), output=LeafOutput.DENOISED, trained_steps=(0, 2))
    tree = build_tree(plan)
    edges = trainable_edges(tree, set(tree.edges()))
    assert [(e.depth, e.index) for e in edges] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert trainable_edges(tree, {tree.level(3)[1]}) == [tree.level(3)[1]]
    model, tree, advantages, kept = run(small_plan((0,), steps=3))
    silent = advantages | dict.fromkeys(tree.level(1), f64(0.0))
    full, part = loss(tree, model, silent, kept), loss(tree, model, advantages, kept - set(tree.level(1)))
    edges = trainable_edges(tree, kept)
    close(full * len(edges), float(part.detach() * (len(edges) - 2)))


@clause("OBJ-3", "ERR-2")
def test_nothing_left_to_train_is_an_error():
    tree = build_tree(small_plan((0,), output=LeafOutput.DENOISED))
    with pytest.raises(PlanError, match="trained edges = 0"):
        trainable_edges(tree, set(tree.level(4)))
    empty = replace(preset("branchgrpo"), pruning=(DepthWindow(1, 10, 1, 1), DepthWindow(11, 9, 1, 1)))
    with pytest.raises(PlanError, match=r"trained edges = 0: must be at least one outside the depth windows"):
        empty.plan_at(0)
    assert empty.plan_at(1) is empty.sampler


@clause("OBJ-4", "ERR-5")
def test_reductions_over_edges():
    model, tree, advantages, kept = run(small_plan((0, 2), steps=4))
    other, wide = moved(model), {"clip_low": 0.999, "clip_high": 1e9}
    edges = trainable_edges(tree, kept)
    alone = {e: number(loss(tree, other, advantages, {e}, Objective(**wide))) for e in edges}
    mean = number(loss(tree, other, advantages, kept, Objective(**wide)))
    assert mean == pytest.approx(sum(alone.values()) / len(edges), rel=1e-12)
    by_depth = [[v for e, v in alone.items() if e.depth == d] for d in (1, 2, 3, 4)]
    expected = sum(sum(row) / len(row) for row in by_depth) / 4
    found = number(loss(tree, other, advantages, kept, Objective(reduction="depth_mean", **wide)))
    assert found == pytest.approx(expected, rel=1e-12)
    assert not math.isclose(found, mean, rel_tol=1e-6)


@clause("OBJ-5", "OBJ-7")
@pytest.mark.parametrize("kernel", [SDE, FLOW, CPS], ids=lambda k: k.kind.value)
@pytest.mark.parametrize("reduction", ["edge_mean", "depth_mean"])
def test_the_kl_to_a_frozen_reference_is_subtracted_without_edge_weights(kernel, reduction):
    model, tree, advantages, kept = run(small_plan((0, 1), kernel=kernel, output=LeafOutput.DENOISED))
    frozen = moved(model)
    options = {"reduction": reduction, "edge_weights": "std"}
    without = number(loss(tree, model, advantages, kept, Objective(**options)))
    found = number(loss(tree, model, advantages, kept, Objective(kl=0.7, **options), frozen=frozen))
    terms = {}
    for edge in trainable_edges(tree, kept):
        parent, sigma = edge.parent, f64([tree.plan.sigmas[edge.depth - 1]])
        difference = model(parent.state[None], sigma, CONDITION) - frozen(parent.state[None], sigma, CONDITION)
        # The mean is affine in v: its slope is what a unit step of v changes.
        zero, one = (kernel_mean(tree.plan, edge.depth - 1, parent.state, v) for v in (0.0, 1.0))
        slope = (one - zero).flatten()[0]
        terms[edge] = ((slope * difference) ** 2).mean() / (2 * edge.std**2)
    assert found == pytest.approx(without - 0.7 * number(reduce_edges(terms, reduction)), rel=1e-12)
    own = loss(tree, model, advantages, kept, Objective(kl=0.7, **options), frozen=model)
    close(own, without)


def kernel_mean(plan, step, x, v):
    return transition(plan, step, x, torch.full_like(x, v))[0]


@clause("OBJ-5")
def test_gradients_flow_through_the_policy_alone():
    model, tree, advantages, kept = run(small_plan((0,)))
    frozen = moved(model)
    j = loss(tree, model, advantages, kept, Objective(kl=1.0), frozen=frozen)
    gradients = torch.autograd.grad(j, [*model.parameters(), *frozen.parameters()], allow_unused=True)
    assert [g is None for g in gradients] == [False, False, True, True]


@clause("OBJ-5", "ERR-3")
def test_a_reference_policy_is_given_if_and_only_if_it_is_used():
    model, tree, advantages, kept = run(small_plan((0,)))
    with pytest.raises(InputError, match=r"reference_model = None: must be given if and only if objective.kl > 0"):
        loss(tree, model, advantages, kept, Objective(kl=0.1))
    with pytest.raises(InputError, match="reference_model = 'given'"):
        loss(tree, model, advantages, kept, Objective(), frozen=model)


@clause("OBJ-6")
def test_weights_go_by_the_distinct_trained_steps_of_the_whole_update():
    model, first, advantages, kept = run(small_plan((0, 1), kernel=FLOW))
    _, second, more, others = run(small_plan((0, 1), kernel=FLOW), seed=1)
    only = {e for e in others if e.depth == 3}
    part = {e for e in kept if e.depth == 1}
    stds = update_stds([first, second], part | only)
    assert sorted(stds) == [0, 2]
    weights = step_weights(stds, "std")
    assert sum(weights.values()) / 2 == pytest.approx(1.0, rel=1e-15)
    options = Objective(edge_weights="std")
    j = objective([first, second], model, [CONDITION] * 2, advantages | more, part | only, options, Reduction.MEAN)
    plain = [float(torch.stack([a[e] for e in edges]).mean()) for a, edges in ((advantages, part), (more, only))]
    assert number(j) == pytest.approx((weights[0] * plain[0] + weights[2] * plain[1]) / 2, rel=1e-11)


@clause("OBJ-7")
def test_the_objective_is_a_mean_over_trees_not_over_all_edges():
    model, tree, advantages, kept = run(small_plan((0,)))
    _, other, more, others = run(small_plan((0, 1)), seed=4)
    few = {e for e in others if e.depth == 1}
    both = objective([tree, other], model, [CONDITION] * 2, advantages | more, kept | few, Objective(), Reduction.MEAN)
    single = [loss(tree, model, advantages, kept), loss(other, model, more, few)]
    close(both, float(torch.stack(single).mean()))


@clause("OBJ-7", "OBJ-1", "OBJ-2", "OBJ-5")
@pytest.mark.parametrize("kernel", [SDE, FLOW, CPS], ids=lambda k: k.kind.value)
@pytest.mark.parametrize("reduction", Reduction)
def test_the_objective_passes_gradcheck(kernel, reduction):
    """Against finite differences in float64, off policy, with clipping at work on some edges and KL."""
    plan = small_plan((0,), steps=3, kernel=kernel, output=LeafOutput.DENOISED)
    model, tree, advantages, kept = run(plan, reduction=reduction)
    frozen, options = moved(model, 0.05), Objective(clip_low=0.02, clip_high=0.02, kl=0.3, edge_weights="std")
    start = f64([0.9, -0.02])

    class Policy(torch.nn.Module):
        guidance = model.guidance

        def __init__(self, weights):
            super().__init__()
            self.weights = weights

        def forward(self, x, sigma, condition):
            return self.weights[0] * model(x, sigma, condition) + self.weights[1] * x

    def value(weights):
        return loss(tree, Policy(weights), advantages, kept, options, reduction, frozen)

    assert torch.autograd.gradcheck(value, (start.requires_grad_(),))


@clause("OBJ-7")
def test_the_gradient_raises_what_earned_more():
    """One split, D = 1: an ascent step raises the log-probability of the better child and lowers the other's."""
    plan = tree_plan(1, SDE, splits=(0,), branching=2, output=LeafOutput.SAMPLE)
    (tree,) = rollout(plan, Scaled(), PROMPT, CONDITION, Sampling(KeyedNoise(0), (1,)))
    better, worse = sorted(tree.root.leaves(), key=lambda leaf: -float(leaf.state))
    advantages = {better: f64(1.0), worse: f64(-1.0)}

    class Shift(torch.nn.Module):
        guidance = Scaled.guidance

        def __init__(self):
            super().__init__()
            self.by = torch.nn.Parameter(f64(0.0))

        def forward(self, x, sigma, condition):
            return x + self.by

    model = Shift()
    j = objective([tree], model, [CONDITION], advantages, {better, worse}, Objective(), Reduction.SUM)
    (gradient,) = torch.autograd.grad(j, [model.by])
    # The mean falls by Δ + g²Δ/2·(1 − σ) … in v: a larger state needs a smaller velocity.
    assert float(gradient) < 0


@clause("OBJ-8", "ERR-3")
def test_conditions_match_trees():
    model, tree, advantages, kept = run(small_plan((0,)))
    with pytest.raises(InputError, match=r"len\(conditions\) = 2: must be 1, one a tree"):
        objective([tree], model, [CONDITION] * 2, advantages, kept, Objective(), Reduction.MEAN)
