"""Small trees, models and noise with known numbers, for the tests of the clauses."""

import dataclasses
import math

import torch

from branchgrpo.conformance.examples import load_examples
from branchgrpo.reference.method import tree_plan
from branchgrpo.reference.protocols import Guidance, Prompt, TensorCondition
from branchgrpo.reference.tree import Node, Tree
from branchgrpo.reference.types import Kernel, KernelKind, LeafOutput

# The examples print 12 to 17 digits; float64 keeps 16: what is left is the rounding of a few operations.
PRINTED = {"rtol": 1e-12, "atol": 1e-12}

PROMPT = Prompt(7, "a cat")
CONDITION = TensorCondition({"label": torch.tensor([0.5])})
SDE = Kernel(KernelKind.SDE, 0.3)
FLOW = Kernel(KernelKind.FLOW_SDE, 0.7)
CPS = Kernel(KernelKind.CPS, 0.7)

__all__ = ["CONDITION", "CPS", "FLOW", "PRINTED", "PROMPT", "SDE", "load_examples"]


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def unchecked(kind, /, **fields):
    """An options object past the tests' own type checks, as a user without them would make it."""
    found = object.__new__(kind)
    for field in dataclasses.fields(kind):
        default = field.default if field.default is not dataclasses.MISSING else None
        object.__setattr__(found, field.name, fields.get(field.name, default))
    found.__post_init__()
    return found


def close(found, expected):
    """Equal to the digits that an example prints."""
    found = found if isinstance(found, torch.Tensor) else f64(found)
    torch.testing.assert_close(found.detach().double(), f64(expected), **PRINTED)


def small_plan(splits=(0, 1), *, steps=4, branching=2, output=LeafOutput.SAMPLE, kernel=SDE, shift=1.0, **options):
    return tree_plan(steps, kernel, splits=splits, branching=branching, output=output, shift=shift, **options)


def build_tree(plan, log_probs=None, prompt=PROMPT, root=0):
    """A tree of scalar states without a rollout; ``log_probs[d - 1][j]`` is that of edge j of depth d, default 0."""
    level = [Node(0, 0, torch.zeros(1, dtype=torch.float64))]
    tree = Tree(plan, prompt, root, level[0])
    for depth, factor in enumerate(plan.branching, start=1):
        below = []
        for parent in level:
            for branch in range(factor):
                index = parent.index * factor + branch
                given = 0.0 if log_probs is None or depth > len(log_probs) else log_probs[depth - 1][index]
                log_prob = f64(given) if depth - 1 in plan.stochastic_steps else None
                child = Node(depth, index, torch.zeros(1, dtype=torch.float64), parent, None, 0.1, log_prob)
                parent.children.append(child)
                below.append(child)
        level = below
    return tree


def leaf_rewards(tree, rewards):
    """Rewards of a tree's leaves, one list a leaf or one number a leaf."""
    rows = [r if isinstance(r, list) else [r] for r in rewards]
    return {leaf: f64(row) for leaf, row in zip(tree.root.leaves(), rows, strict=True)}


def level_values(tree, values, depth):
    return torch.stack([values[node] for node in tree.level(depth)])


class Table:
    """A noise source that answers from a table (role, depth, node) → value, and counts what it was asked."""

    def __init__(self, values):
        self.values, self.asked = values, []

    def draw(self, keys, shape, dtype, device):
        rows = []
        for root, node in zip(keys.roots.tolist(), keys.nodes.tolist(), strict=True):
            self.asked.append((str(keys.role), root, keys.depth, node))
            rows.append(torch.full(tuple(shape), self.values[str(keys.role), keys.depth, node], dtype=dtype))
        return torch.stack(rows).to(device)


class Scaled:
    """v = factor · x, with the calls it received."""

    guidance = Guidance()

    def __init__(self, factor=1.0):
        self.factor, self.calls = factor, []

    def __call__(self, x, sigma, condition):
        self.calls.append((x.clone(), sigma.clone(), len(condition)))
        return self.factor * x


class Network(torch.nn.Module):
    """A small smooth velocity that reads x, σ and the condition."""

    guidance = Guidance()

    def __init__(self, latent=(2, 3), seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        width = math.prod(latent)
        self.inner = torch.nn.Parameter(torch.randn(width + 2, 8, generator=generator, dtype=torch.float64) / 3)
        self.outer = torch.nn.Parameter(torch.randn(8, width, generator=generator, dtype=torch.float64) / 3)

    def forward(self, x, sigma, condition):
        features = torch.cat([x.flatten(1), sigma[:, None], condition.tensors["label"][:, None].to(x.dtype)], dim=1)
        weights = self.inner.to(x.dtype), self.outer.to(x.dtype)
        return (torch.tanh(features @ weights[0]) @ weights[1]).view_as(x)


class Toy:
    """Reward −|x − target|² a sample."""

    name, version, range = "toy", "1", (-math.inf, 0.0)

    def __init__(self, target=0.3):
        self.target = target

    def __call__(self, samples, prompts):
        return -(samples.double() - self.target).square().flatten(1).sum(dim=1)
