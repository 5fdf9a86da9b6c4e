"""The reference from plan to gradient on a small model: on-policy ratios, pruned gradients, plan families."""

import math
from itertools import pairwise

import pytest
import torch

from branchgrpo.reference.family import PlanFamily
from branchgrpo.reference.fusion import fuse
from branchgrpo.reference.granularity import granular_indices
from branchgrpo.reference.log_probability import gaussian_log_density
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.normalization import normalize
from branchgrpo.reference.objective import edge_means, objective, trainable_edges
from branchgrpo.reference.options import DepthWindow, ExtremeB, Fusion, Normalization, Objective, ParentTop1
from branchgrpo.reference.protocols import Guidance, Prompt, TensorCondition
from branchgrpo.reference.pruning import leaf_keys, prune
from branchgrpo.reference.reward import score
from branchgrpo.reference.rollout import Sampling, rollout
from branchgrpo.reference.schedule import shifted_schedule
from branchgrpo.reference.singular import multi_granularity_advantages, perturbed_edges, singular_rollout
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput, Reduction

LATENT = (2, 3)
KERNELS = {
    "sde": Kernel(KernelKind.SDE, 0.3),
    "flow_sde": Kernel(KernelKind.FLOW_SDE, 0.7),
    "cps": Kernel(KernelKind.CPS, 0.7),
}


class Network(torch.nn.Module):
    """A small non-linear velocity that reads x, σ and the condition."""

    guidance = Guidance()

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        width = math.prod(LATENT)
        self.inner = torch.nn.Parameter(torch.randn(width + 2, 8, generator=generator, dtype=torch.float64) / 3)
        self.outer = torch.nn.Parameter(torch.randn(8, width, generator=generator, dtype=torch.float64) / 3)

    def forward(self, x, sigma, condition):
        features = torch.cat([x.flatten(1), sigma[:, None], condition.tensors["label"][:, None].to(x.dtype)], dim=1)
        weights = self.inner.to(x.dtype), self.outer.to(x.dtype)
        return (torch.tanh(features @ weights[0]) @ weights[1]).view_as(x)


class Distance:
    """Reward −|x − t|² a sample."""

    version, range = "1", (-math.inf, 0.0)

    def __init__(self, target: float) -> None:
        self.name, self.target = f"distance-{target}", target

    def __call__(self, samples, prompts):
        return -(samples.double() - self.target).square().flatten(1).sum(dim=1)


PROMPT = Prompt(7, "seven")
CONDITION = TensorCondition({"label": torch.tensor([0.5])})


def sampling(**options):
    return Sampling(KeyedNoise(3), LATENT, **options)


def rolled(plan, **options):
    model = Network()
    return model, rollout(plan, model, PROMPT, CONDITION, sampling(**options))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("storage", [torch.float64, torch.float32, torch.bfloat16])
def test_the_on_policy_ratio_is_one_for_every_storage_dtype(kernel, storage):
    plan = tree_plan(5, KERNELS[kernel], splits=(0, 2), branching=2, spread=2.0)
    model, (tree,) = rolled(plan, storage_dtype=storage, reduction=Reduction.SUM)
    edges = [edge for edge in tree.edges() if edge.log_prob is not None]
    assert len(edges) == 2 + 2 + 4 + 4
    means = edge_means(edges, tree, model, CONDITION)
    for edge in edges:
        assert edge.state.dtype == storage
        log_prob = gaussian_log_density(edge.state, means[edge], edge.std, Reduction.SUM)
        assert torch.equal(log_prob, edge.log_prob)


def gradient(value, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))])


@pytest.mark.parametrize("rules", [(ParentTop1(),), (ExtremeB(1, drop_split_edges=True),), (DepthWindow(2, size=2),)])
def test_the_pruned_gradient_is_the_mean_of_the_unpruned_edges_that_stay(rules):
    plan = tree_plan(5, KERNELS["sde"], splits=(0, 2), branching=2, spread=2.0)
    model, (tree,) = rolled(plan)
    rewards = score(tree, [Distance(0.0), Distance(1.0)])
    values = fuse(tree, rewards, Fusion())
    weights, options, surrogate = (0.7, 0.3), Normalization(), Objective()
    advantages = normalize([tree], values, weights, options)
    keys = leaf_keys([tree], values, weights, options)
    kept = prune([tree], keys, rules, 0)
    pruned = gradient(objective([tree], model, [CONDITION], advantages, kept, surrogate, Reduction.MEAN), model)
    everything = prune([tree], keys, (), 0)
    edges = trainable_edges(tree, kept)
    assert 0 < len(edges) < len(trainable_edges(tree, everything))
    alone = [
        gradient(objective([tree], model, [CONDITION], advantages, {edge}, surrogate, Reduction.MEAN), model)
        for edge in edges
    ]
    torch.testing.assert_close(pruned, torch.stack(alone).mean(dim=0), rtol=1e-12, atol=1e-15)


def test_one_granularity_is_the_plan_with_one_split():
    family = PlanFamily(shifted_schedule(6), KERNELS["flow_sde"], (0, 1, 2), group=3)
    model = Network()
    trees = singular_rollout(family, model, PROMPT, CONDITION, sampling())
    for k in family.ks:
        plan = tree_plan(6, KERNELS["flow_sde"], splits=(k,), branching=3, sde_steps=())
        assert family.member(k, 1) == plan
        (alone,) = rollout(plan, model, PROMPT, CONDITION, sampling())
        (member,) = trees[k, 1]
        values = fuse(member, score(member, [Distance(0.0)]), Fusion())
        mine = multi_granularity_advantages(family, k, trees, values, (1.0,), Normalization())
        other = normalize([alone], fuse(alone, score(alone, [Distance(0.0)]), Fusion()), (1.0,), Normalization())
        for a, b in zip(perturbed_edges(member, k), perturbed_edges(alone, k), strict=True):
            assert torch.equal(a.state, b.state)
            assert torch.equal(mine[a], other[b])


def test_members_share_anchor_and_children():
    family = PlanFamily(shifted_schedule(7), KERNELS["flow_sde"], (0, 2), group=2, granularities=(1, 2, 3))
    trees = singular_rollout(family, Network(), PROMPT, CONDITION, sampling())
    for k in family.ks:
        for depth in range(k + 2):
            levels = [[node.state for node in trees[k, g][0].level(depth)] for g in family.granularities]
            assert all(torch.equal(a, b) for level in levels[1:] for a, b in zip(level, levels[0], strict=True))


@pytest.mark.parametrize("anchor", ["start", "end"])
@pytest.mark.parametrize("granularity", range(1, 6))
def test_every_continuation_ends_at_sigma_zero(anchor, granularity):
    for start in range(1, 17):
        visited = granular_indices(start, 16, granularity, anchor)
        assert visited[0] == start
        assert visited[-1] == 16
        assert all(b > a for a, b in pairwise(visited))


def test_a_sample_plan_may_perturb_the_last_step():
    family = PlanFamily(shifted_schedule(4), KERNELS["sde"], (3,), group=2, output=LeafOutput.SAMPLE)
    trees = singular_rollout(family, Network(), PROMPT, CONDITION, sampling())
    assert [leaf.depth for leaf in trees[3, 1][0].root.leaves()] == [4, 4]
