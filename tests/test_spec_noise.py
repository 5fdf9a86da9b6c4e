"""Clauses of spec/noise.md and spec/rollout.md."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers_spec import CONDITION, PROMPT, SDE, Network, Scaled, Table, close, f64, load_examples, small_plan

from branchgrpo.conformance.clauses import clause
from branchgrpo.reference.errors import OptionError
from branchgrpo.reference.kernels import transition
from branchgrpo.reference.keys import keyed_generator
from branchgrpo.reference.noise import KeyedNoise, branch_coefficients, branch_noise
from branchgrpo.reference.objective import edge_means
from branchgrpo.reference.protocols import Guidance, NoiseKeys, NoiseRole, Prompt, TensorCondition
from branchgrpo.reference.rollout import Sampling, rollout
from branchgrpo.reference.types import ODE, Kernel, KernelKind, LeafOutput

NOISE, TREE = load_examples("noise"), load_examples("rollout")["tree"]
KEY = NOISE["key"]


@clause("NOISE-1", "NOISE-2")
def test_the_example_branch_noise():
    e = NOISE["branch"]
    for private, noise in zip(e["private"], e["noise"], strict=True):
        close(branch_noise(f64(e["shared"]), f64(private), e["spread"]), noise)


@clause("NOISE-2")
def test_coefficients_have_a_value_at_every_spread():
    e = NOISE["coefficients"]
    assert branch_coefficients(e["spread"]) == pytest.approx((e["a"], e["c"]), rel=1e-15)
    assert e["a"] ** 2 == pytest.approx(e["correlation"], rel=1e-14)
    assert branch_coefficients(0.0) == (1.0, 0.0)
    assert branch_coefficients(math.inf) == (0.0, 1.0)
    assert branch_coefficients(1e300)[1] == 1.0
    for spread in (0.0, 0.3, 1.0, 4.0, 1e8, 1e200, math.inf):
        a, c = branch_coefficients(spread)
        assert a * a + c * c == pytest.approx(1.0, rel=1e-15)


@clause("NOISE-1", "NOISE-3")
def test_which_draws_a_tree_asks_for_and_what_it_makes_of_them():
    plan = replace(
        small_plan((0, 1), steps=3, output=LeafOutput.SAMPLE, spread=1.0),
        kernels=(SDE, SDE, ODE),
    )
    values = {("root", 0, 0): 0.0, ("shared", 0, 0): 1.0, ("shared", 1, 0): 2.0, ("shared", 1, 1): -2.0}
    values |= {("private", 1, 0): 0.5, ("private", 1, 1): -0.5}
    values |= {("private", 2, j): 0.1 * j for j in range(4)}
    noise = Table(values)
    (tree,) = rollout(plan, Scaled(0.0), PROMPT, CONDITION, Sampling(noise, (1,)))
    assert {(role, depth, node) for role, _, depth, node in noise.asked} == set(values)
    half = math.sqrt(0.5)
    for depth, parents in ((1, [1.0]), (2, [2.0, -2.0])):
        for node in tree.level(depth):
            assert node.parent is not None
            assert node.mean is not None
            xi = half * parents[node.parent.index] + half * values["private", depth, node.index]
            close(node.state, (node.mean + node.std * xi).tolist())


@clause("NOISE-1", "PLAN-3")
def test_without_a_split_the_noise_is_the_private_draw_whatever_the_spread():
    states = []
    for spread in (0.0, 4.0, math.inf):
        noise = Table({("root", 0, 0): 0.3} | {("private", d, 0): 0.1 * d for d in (1, 2, 3, 4)})
        plan = replace(small_plan(()), spreads=(spread,) * 4)
        (tree,) = rollout(plan, Scaled(), PROMPT, CONDITION, Sampling(noise, (1,)))
        states.append(torch.cat([node.state for node in tree.root.walk()]))
        for edge in tree.edges():
            assert edge.mean is not None
            close(edge.state, (edge.mean + edge.std * 0.1 * edge.depth).tolist())
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[1], states[2])


@clause("NOISE-4")
def test_the_example_key():
    key = (KEY["seed"], KEY["iteration"], NoiseRole(KEY["role"]), KEY["prompt"], KEY["root"], KEY["depth"], KEY["node"])
    generator = keyed_generator(*key)
    state = generator.bit_generator.state["state"]
    assert state["counter"].tolist() == KEY["counter"]
    assert state["key"].tolist() == [KEY["seed"], KEY["iteration"]]
    assert [str(raw) for raw in keyed_generator(*key).bit_generator.random_raw(4)] == KEY["raw"]
    assert generator.standard_normal(4).tolist() == KEY["normal"]
    at = [torch.tensor([KEY[part]]) for part in ("prompt", "root", "node")]
    keys = NoiseKeys(KEY["iteration"], NoiseRole.PRIVATE, KEY["depth"], *at)
    drawn = KeyedNoise(KEY["seed"]).draw(keys, (2, 2), torch.float64, torch.device("cpu"))
    assert drawn.tolist() == [np.reshape(KEY["normal"], (2, 2)).tolist()]
    low = KeyedNoise(KEY["seed"]).draw(keys, (2, 2), torch.bfloat16, torch.device("cpu"))
    assert torch.equal(low, drawn.to(torch.bfloat16))


@clause("NOISE-4")
def test_draws_do_not_depend_on_batch_order_or_chunk():
    prompts, roots, nodes = torch.tensor([4, 4, 9, 2**40]), torch.tensor([0, 1, 0, 3]), torch.tensor([0, 5, 5, 1])
    source, cpu = KeyedNoise(11), torch.device("cpu")

    def draw(index):
        keys = NoiseKeys(2, NoiseRole.SHARED, 3, prompts[index], roots[index], nodes[index])
        return source.draw(keys, (3,), torch.float64, cpu)

    whole = draw(torch.arange(4))
    assert torch.equal(draw(torch.tensor([3, 1, 2, 0])), whole[[3, 1, 2, 0]])
    assert torch.equal(torch.cat([draw(torch.tensor([i])) for i in range(4)]), whole)


@clause("NOISE-4")
def test_every_part_of_the_key_matters():
    base = {"seed": 1, "iteration": 1, "role": NoiseRole.PRIVATE, "prompt": 1, "root": 1, "depth": 1, "node": 1}
    changed = [base] + [base | {name: 2} for name in base if name != "role"]
    changed += [base | {"role": role} for role in NoiseRole if role is not NoiseRole.PRIVATE]
    draws = [tuple(keyed_generator(**key).standard_normal(8)) for key in changed]
    assert len(set(draws)) == len(draws) == 11
    top = {"seed": 2**64 - 1, "iteration": 2**64 - 1, "prompt": 2**63 - 1, "root": 2**32 - 1, "depth": 2**24 - 1}
    assert keyed_generator(**top, role=NoiseRole.WINDOW, node=2**63 - 1).standard_normal() != 0.0
    for name, value in {**{k: v + 1 for k, v in top.items()}, "node": -1}.items():
        with pytest.raises(OptionError, match=rf"noise key {name}"):
            keyed_generator(**(base | {name: value}))


@clause("ROLL-1", "ROLL-3", "ROLL-6", "LOGP-1", "PLAN-6")
def test_the_example_tree():
    kernel, (shared, first, second) = Kernel(KernelKind.SDE, TREE["eta"]), (0.0, *TREE["private"])
    plan = replace(
        small_plan((0,), steps=2, kernel=kernel, output=LeafOutput.DENOISED), branching=tuple(TREE["branching"])
    )
    assert list(plan.sigmas) == TREE["sigmas"]
    noise = Table({("root", 0, 0): TREE["root"], ("shared", 0, 0): shared} | {
        ("private", 1, 0): first, ("private", 1, 1): second,
    })  # fmt: skip
    model = Scaled()
    (tree,) = rollout(plan, model, PROMPT, CONDITION, Sampling(noise, (1,)))
    for child, state in zip(tree.level(1), TREE["children"], strict=True):
        assert child.mean is not None
        assert child.log_prob is not None
        close(child.mean, [TREE["mean"]])
        assert child.std == pytest.approx(TREE["std"], rel=1e-15)
        close(child.state, [state])
        close(child.log_prob, TREE["log_prob"])
    close(torch.cat([leaf.state for leaf in tree.root.leaves()]), TREE["leaves"])
    for leaf in tree.root.leaves():
        assert leaf.parent is not None
        close(leaf.state, (leaf.parent.state - 0.5 * leaf.parent.state).tolist())
    assert len(model.calls) == TREE["calls"]


@clause("ROLL-1")
def test_children_are_numbered_in_sibling_order():
    (tree,) = rollout(small_plan((0, 2), branching=3), Scaled(), PROMPT, CONDITION, Sampling(KeyedNoise(0), (1,)))
    for depth in range(1, 5):
        level = tree.level(depth)
        assert [node.index for node in level] == list(range(tree.plan.level_sizes[depth]))
        factor = tree.plan.branching[depth - 1]
        assert [node.parent.index for node in level if node.parent] == [node.index // factor for node in level]
    for node in tree.root.walk():
        indices = [leaf.index for leaf in node.leaves()]
        assert indices == list(range(indices[0], indices[0] + len(indices)))


@clause("ROLL-2")
def test_a_rollout_is_a_function_of_its_arguments():
    def states(prompt=PROMPT, seed=0, iteration=0):
        sampling = Sampling(KeyedNoise(seed), (2, 3), iteration=iteration)
        (tree,) = rollout(small_plan((0,)), Network(), prompt, CONDITION, sampling)
        assert all(not node.state.requires_grad for node in tree.root.walk())
        return torch.stack([node.state for node in tree.root.walk()])

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = states()
    assert torch.equal(torch.get_rng_state(), before)
    np.random.seed(3)  # noqa: NPY002 - that the global state is not read is the point
    torch.manual_seed(2)
    assert torch.equal(states(), first)
    assert torch.equal(states(prompt=Prompt(7, "another text")), first)
    for other in (states(prompt=Prompt(8, "a cat")), states(seed=1), states(iteration=1)):
        assert not torch.equal(other[0], first[0])


@clause("ROLL-3")
@pytest.mark.parametrize("storage", [torch.float64, torch.bfloat16])
def test_one_call_a_parent_at_the_stored_state_and_its_own_sigma(storage):
    model = Scaled()
    sampling = Sampling(KeyedNoise(0), (2,), dtype=torch.float32, storage_dtype=storage)
    (tree,) = rollout(small_plan((0, 1)), model, PROMPT, CONDITION, sampling)
    parents = [node for node in tree.root.walk() if node.children]
    assert len(model.calls) == len(parents)
    for node, (x, sigma, items) in zip(parents, model.calls, strict=True):
        assert torch.equal(x[0], node.state.to(torch.float32))
        assert sigma.tolist() == [tree.plan.sigmas[node.depth]]
        assert items == 1
        assert {child.state.dtype for child in node.children} == {storage}


@clause("ROLL-4")
def test_guidance_is_applied_inside_the_model_with_gradients_through_both_branches():
    class Guided(torch.nn.Module):
        guidance = Guidance("classifier_free", 3.0)

        def __init__(self):
            super().__init__()
            self.plus = torch.nn.Parameter(f64(0.4))
            self.minus = torch.nn.Parameter(f64(0.1))

        def forward(self, x, sigma, condition):
            both = torch.cat([self.plus * x, self.minus * x])
            plus, minus = both.chunk(2)
            return minus + self.guidance.scale * (plus - minus)

    model, plan = Guided(), small_plan((), steps=1)
    (tree,) = rollout(plan, model, PROMPT, TensorCondition({"c": torch.zeros(1)}), Sampling(KeyedNoise(0), (1,)))
    (leaf,) = tree.root.leaves()
    means = edge_means([leaf], tree, model, CONDITION)
    assert torch.equal(means[leaf].detach(), leaf.mean)
    gradients = torch.autograd.grad(means[leaf].sum(), [model.plus, model.minus])
    assert gradients[0].item() == pytest.approx(-1.5 * gradients[1].item(), rel=1e-12)


@clause("ROLL-5")
def test_everything_reads_the_rounded_state():
    sampling = Sampling(KeyedNoise(0), (2, 3), dtype=torch.float32, storage_dtype=torch.bfloat16)
    model = Network()
    (tree,) = rollout(small_plan((0,)), model, PROMPT, CONDITION, sampling)
    assert tree.root.state.dtype == torch.bfloat16
    for edge in tree.edges():
        assert edge.parent is not None
        assert edge.mean is not None
        x = edge.parent.state.float()
        v = model(x[None], torch.tensor([tree.plan.sigmas[edge.depth - 1]]), CONDITION)[0].detach()
        assert torch.equal(edge.mean, transition(tree.plan, edge.depth - 1, x, v)[0])
        assert edge.mean.dtype == torch.float32


@clause("ROLL-6")
@pytest.mark.parametrize("output", LeafOutput)
def test_a_leaf_is_the_sample_or_the_denoised_state(output):
    model = Network()
    (tree,) = rollout(small_plan((0,), output=output), model, PROMPT, CONDITION, Sampling(KeyedNoise(0), (2, 3)))
    for leaf in tree.root.leaves():
        assert leaf.parent is not None
        sigma = f64([tree.plan.sigmas[-2]])
        v = model(leaf.parent.state[None], sigma, CONDITION)[0].detach()
        is_denoised = torch.allclose(leaf.state, leaf.parent.state - sigma * v, rtol=1e-14, atol=1e-14)
        assert is_denoised == (output is LeafOutput.DENOISED)
