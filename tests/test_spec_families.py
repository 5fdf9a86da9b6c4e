"""Clauses of spec/singular.md and spec/granularity.md."""

import math
from dataclasses import replace

import pytest
import torch
from helpers_spec import CONDITION, FLOW, PROMPT, SDE, Network, Scaled, Toy, close, f64, load_examples

from branchgrpo.conformance.clauses import clause
from branchgrpo.reference.counts import count, count_family, count_plan
from branchgrpo.reference.errors import PlanError
from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.family_counts import anchor_calls, continuation_calls
from branchgrpo.reference.fusion import fuse
from branchgrpo.reference.granularity import distinct_calls, granular_indices
from branchgrpo.reference.kernels import plan_stds
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.normalization import normalize
from branchgrpo.reference.objective import objective
from branchgrpo.reference.options import Fusion, Normalization, Objective
from branchgrpo.reference.presets import preset
from branchgrpo.reference.reward import score
from branchgrpo.reference.rollout import Sampling, rollout
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.singular import multi_granularity_advantages, perturbed_edges, singular_rollout
from branchgrpo.reference.types import ODE, LeafOutput, Reduction

SINGULAR, GRANULAR = load_examples("singular"), load_examples("granularity")
SMALL = SINGULAR["small"]


def family(**options):
    defaults = {"sigmas": shifted_schedule(6), "kernel": FLOW, "ks": (0, 2), "group": 3, "granularities": (1, 2)}
    return PlanFamily(**defaults | options)


def sampling():
    return Sampling(KeyedNoise(2), (2, 3))


@clause("GRAN-1", "GRAN-2")
@pytest.mark.parametrize(
    "e", GRANULAR["continuation"], ids=lambda e: f"k{e['k']}-lambda{e['granularity']}-T{e['steps']}"
)
def test_the_example_continuations(e):
    for anchor in ("start", "end"):
        assert list(granular_indices(e["k"] + 1, e["steps"], e["granularity"], anchor)) == e[anchor]


@clause("GRAN-1", "GRAN-2")
def test_continuations_by_the_formulas():
    for steps in range(1, 12):
        for start in range(1, steps + 1):
            for granularity in range(1, 5):
                visited = granular_indices(start, steps, granularity)
                inner = [start + 1 + j * granularity for j in range(steps)]
                assert visited == (start, *(i for i in inner if i < steps), *((steps,) if start < steps else ()))
                congruent = [i for i in range(start + 1, steps + 1) if (steps - i) % granularity == 0]
                assert granular_indices(start, steps, granularity, "end") == (start, *congruent)


@clause("GRAN-2", "ERR-2")
def test_granularities_and_starts_out_of_range_are_refused():
    for granularity in (0, -1):
        with pytest.raises(PlanError, match="granularity"):
            granular_indices(1, 4, granularity)
        with pytest.raises(PlanError, match="granularity"):
            family(granularities=(granularity,))
    for start in (0, 5):
        with pytest.raises(PlanError, match="start"):
            granular_indices(start, 4, 1)


@clause("GRAN-3")
def test_the_example_calls():
    e = GRANULAR["calls"]
    assert distinct_calls(e["indices"]) == e["distinct"]
    assert [list(granular_indices(2, 16, g)) for g in (1, 2, 3)] == e["indices"]
    assert distinct_calls([(4,)]) == 0


@clause("SING-4", "GRAN-3")
def test_the_example_family():
    fam = PlanFamily(shifted_schedule(4), SDE, tuple(SMALL["ks"]), SMALL["group"], tuple(SMALL["granularities"]))
    for name, indices in SMALL["continuations"].items():
        k, granularity = map(int, name.split(","))
        assert list(fam.continuation(k, granularity)) == indices
    assert anchor_calls(fam) == SMALL["anchor_calls"]
    assert continuation_calls(fam) == SMALL["continuation_calls"]
    counts = count_family(fam)
    assert counts.denoiser_calls == SMALL["calls"]
    assert counts.calls_shared == SMALL["calls_full_anchor"]


@clause("SING-4", "GRAN-3")
def test_a_rollout_calls_each_input_once():
    fam, model = family(granularities=(1, 2, 3), roots=2), Scaled(0.3)
    singular_rollout(fam, model, PROMPT, CONDITION, sampling())
    inputs = {(x.numpy().tobytes(), float(sigma)) for x, sigma, _ in model.calls}
    assert len(inputs) == len(model.calls) == count_family(fam).denoiser_calls
    one_by_one = sum(count_plan(fam.member(*member)).denoiser_calls for member in fam.members())
    assert len(inputs) < one_by_one


class OneBuffer(Scaled):
    """Writes every answer to the same memory."""

    def __call__(self, x, sigma, condition):
        v = super().__call__(x, sigma, condition)
        self.buffer = v if len(self.calls) == 1 else self.buffer.copy_(v)
        return self.buffer


@clause("SING-4")
def test_velocities_that_the_model_overwrites_are_remembered():
    fam = family(granularities=(1, 2, 3))
    found = singular_rollout(fam, OneBuffer(0.3), PROMPT, CONDITION, sampling())
    expected = singular_rollout(fam, Scaled(0.3), PROMPT, CONDITION, sampling())
    for member in fam.members():
        for one, other in zip(found[member][0].root.walk(), expected[member][0].root.walk(), strict=True):
            assert torch.equal(one.state, other.state)


@clause("SING-4", "GRAN-3")
def test_the_published_calls():
    e = SINGULAR["published"]
    names = {(1,): "g2rpo-single", (1, 2): "g2rpo-12", (1, 2, 3): "g2rpo"}
    for i, granularities in enumerate(e["granularities"]):
        method = preset(names[tuple(granularities)])
        fam = method.sampler
        assert isinstance(fam, PlanFamily)
        assert (fam.steps, fam.group, fam.granularities) == (e["steps"], e["group"], tuple(granularities))
        counts = count(method)
        for name in ("calls_public", "calls_shared", "calls_shared_stopped_anchor"):
            assert getattr(counts, name) == e[name][i], name


@clause("SING-1", "GRAN-1", "KERN-3")
def test_a_member_is_deterministic_but_for_its_step():
    fam = family(stride_anchor="end")
    for k, granularity in fam.members():
        plan = fam.member(k, granularity)
        indices = fam.continuation(k, granularity)
        assert plan.sigmas == (*fam.sigmas[: k + 1], *(fam.sigmas[i] for i in indices))
        assert [kernel == FLOW for kernel in plan.kernels] == [i == k for i in range(plan.steps)]
        assert {kernel for i, kernel in enumerate(plan.kernels) if i != k} <= {ODE}
        assert plan.branching == tuple(3 if i == k else 1 for i in range(plan.steps))
        assert plan.spreads[k] == math.inf
        full = tree_plan(6, FLOW)
        assert plan_stds(plan)[k] == plan_stds(full)[k] > 0


@clause("SING-2")
def test_only_the_children_of_step_k_have_a_log_probability():
    fam = family()
    trees = singular_rollout(fam, Network(), PROMPT, CONDITION, sampling())
    for (k, _), (tree,) in trees.items():
        assert [edge for edge in tree.edges() if edge.log_prob is not None] == perturbed_edges(tree, k)
        assert tree.plan.trainable_steps == (k,)
        values = fuse(tree, score(tree, [Toy()]), Fusion(beta=5.0))
        for child in perturbed_edges(tree, k):
            (leaf,) = child.leaves()
            assert torch.equal(values[child], values[leaf])


@clause("SING-3", "NOISE-4")
def test_members_share_root_anchor_and_children():
    fam = family(ks=(0, 1, 3), granularities=(1, 2, 3), roots=2)
    trees = singular_rollout(fam, Network(), PROMPT, CONDITION, sampling())
    for root in range(2):
        anchor = [trees[3, 1][root].level(d)[0].state for d in range(4)]
        for (k, _), members in trees.items():
            for depth in range(k + 1):
                (node,) = members[root].level(depth)
                assert torch.equal(node.state, anchor[depth])
            children = [[n.state for n in trees[k, g][root].level(k + 1)] for g in fam.granularities]
            for other in children[1:]:
                assert all(torch.equal(a, b) for a, b in zip(other, children[0], strict=True))
            assert not torch.equal(children[0][0], children[0][1])


@clause("SING-5", "ERR-2")
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"ks": ()}, "ks"),
        ({"ks": (2, 0)}, "ks"),
        ({"ks": (1, 1)}, "ks"),
        ({"ks": (-1,)}, "ks"),
        ({"ks": (5,)}, "ks"),
        ({"ks": (6,), "output": LeafOutput.SAMPLE}, "ks"),
        ({"group": 1}, "group"),
        ({"granularities": ()}, "granularities"),
        ({"granularities": (1, 1)}, "granularities"),
        ({"kernel": ODE}, "branching"),
    ],
)
def test_families_that_carry_no_signal_are_refused(options, field):
    with pytest.raises(PlanError, match=field):
        family(**options)


@clause("SING-5", "PLAN-6")
def test_under_sample_the_last_step_may_be_perturbed_and_the_leaf_is_the_child():
    fam = family(ks=(5,), output=LeafOutput.SAMPLE)
    (tree,) = singular_rollout(fam, Network(), PROMPT, CONDITION, sampling())[5, 2]
    assert tree.root.leaves() == perturbed_edges(tree, 5)
    assert family(ks=(4,)).ks == (4,)


def advantages_of(rewards_by_granularity, weights=(1.0,), options=None, granularities=(1, 2)):
    """Advantages of the children of k = 0 for given leaf rewards, by granularity."""
    fam = family(ks=(0,), granularities=granularities)
    trees = singular_rollout(fam, Scaled(), PROMPT, CONDITION, sampling())
    values = {}
    for granularity, rewards in zip(granularities, rewards_by_granularity, strict=True):
        (tree,) = trees[0, granularity]
        rows = [f64(r if isinstance(r, list) else [r]) for r in rewards]
        values |= fuse(tree, dict(zip(tree.root.leaves(), rows, strict=True)), Fusion())
    found = multi_granularity_advantages(fam, 0, trees, values, weights, options or Normalization())
    (first,) = trees[0, granularities[0]]
    assert list(found) == perturbed_edges(first, 0)
    return torch.stack(list(found.values()))


@clause("GRAN-4", "GRAN-5")
def test_the_example_advantages():
    e = GRANULAR["advantages"]
    close(advantages_of(e["rewards"]), e["sums"])


@clause("GRAN-4", "NORM-5")
def test_rewards_are_weighted_within_a_granularity_and_granularities_count_alike():
    first, second = [[1.0, 5.0], [2.0, 1.0], [4.0, 2.0]], [[0.0, 1.0], [0.5, 1.0], [3.0, 1.0]]
    column = lambda rows, m: [row[m] for row in rows]  # noqa: E731

    def z(row):
        return (f64(row) - f64(row).mean()) / (f64(row).std() + 1e-8)

    expected = 2.0 * z(column(first, 0)) - 0.5 * z(column(first, 1)) + 2.0 * z(column(second, 0))
    close(advantages_of([first, second], (2.0, -0.5)), expected.tolist())


@clause("GRAN-5", "GRAN-4")
def test_the_sum_over_granularities_is_clipped_once():
    rows = [[0.0, 0.0, 3.0]] * 3
    one = float(advantages_of(rows[:1], granularities=(1,))[2])
    found = advantages_of(rows, granularities=(1, 2, 3), options=Normalization(clip=2.5 * one))
    assert float(found[2]) == pytest.approx(2.5 * one, rel=1e-14)
    opposite = advantages_of([rows[0], [0.0, 0.0, -3.0]], options=Normalization(clip=0.5 * one))
    assert opposite.abs().max() <= 1e-15


@clause("GRAN-6")
def test_one_granularity_is_the_plan_with_one_split():
    fam = family(granularities=(1,))
    model = Network()
    trees = singular_rollout(fam, model, PROMPT, CONDITION, sampling())
    for k in fam.ks:
        plan = tree_plan(6, FLOW, splits=(k,), branching=3, sde_steps=())
        assert fam.member(k, 1) == plan
        (alone,), (member,) = rollout(plan, model, PROMPT, CONDITION, sampling()), trees[k, 1]
        for a, b in zip(member.root.walk(), alone.root.walk(), strict=True):
            assert torch.equal(a.state, b.state)
        values = [fuse(tree, score(tree, [Toy()]), Fusion()) for tree in (member, alone)]
        mine = multi_granularity_advantages(fam, k, trees, values[0], (1.0,), Normalization())
        other = normalize([alone], values[1], (1.0,), Normalization())
        for a, b in zip(perturbed_edges(member, k), perturbed_edges(alone, k), strict=True):
            assert torch.equal(mine[a], other[b])


@clause("SING-6")
def test_the_objective_of_a_family_is_a_mean_over_its_group_and_its_steps():
    fam, model = family(), Network()
    trees = singular_rollout(fam, model, PROMPT, CONDITION, sampling())
    values = {}
    for (tree,) in trees.values():
        values |= fuse(tree, score(tree, [Toy()]), Fusion())
    advantages, trained = {}, []
    for k in fam.ks:
        mine = multi_granularity_advantages(fam, k, trees, values, (1.0,), Normalization())
        advantages |= {edge: a + float(k) for edge, a in mine.items()}
        trained += trees[k, 1]
    kept = {edge for tree in trained for edge in tree.edges()}
    j = objective(trained, model, [CONDITION] * 2, advantages, kept, Objective(), Reduction.MEAN)
    close(j, sum(fam.ks) / len(fam.ks))
    weighted = replace(Objective(), edge_weights="std")
    j = objective(trained, model, [CONDITION] * 2, advantages, kept, weighted, Reduction.MEAN)
    stds = [plan_stds(fam.member(k, 1))[k] for k in fam.ks]
    close(j, sum(k * s for k, s in zip(fam.ks, stds, strict=True)) / sum(stds))
