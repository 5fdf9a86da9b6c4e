"""Growing a tree, node by node (spec: rollout)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.errors import check_latent_shape
from branchgrpo.reference.kernels import transition
from branchgrpo.reference.log_probability import gaussian_log_density
from branchgrpo.reference.noise import branch_noise
from branchgrpo.reference.plan import Plan
from branchgrpo.reference.protocols import Condition, NoiseKeys, NoiseRole, NoiseSource, Prompt, VelocityModel
from branchgrpo.reference.tree import Node, Tree
from branchgrpo.reference.types import Reduction
from branchgrpo.reference.velocity import velocity

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sampling:
    """Everything a rollout needs beside the plan, the model and the prompt (ROLL-2).

    Attributes:
        noise: where standard normal numbers come from.
        latent_shape: shape of one state.
        dtype: dtype of the arithmetic.
        storage_dtype: dtype in which states are kept; the realised-action rule holds for each (ROLL-5, LOGP-3).
        reduction: reduction of the log-probabilities.
        iteration: training iteration; part of every noise key.
        device: where the arithmetic is done.
    """

    noise: NoiseSource
    latent_shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    storage_dtype: torch.dtype = torch.float64
    reduction: Reduction = Reduction.MEAN
    iteration: int = 0
    device: torch.device = CPU

    def __post_init__(self) -> None:
        check_latent_shape(self.latent_shape)

    def draw(self, role: NoiseRole, prompt: Prompt, root: int, depth: int, node: int) -> Float[Tensor, "*latent"]:
        """The standard normal draw of one key.  Clause: NOISE-4."""
        at = [torch.tensor([part], dtype=torch.int64) for part in (prompt.id, root, node)]
        keys = NoiseKeys(self.iteration, role, depth, *at)
        return self.noise.draw(keys, self.latent_shape, self.dtype, self.device)[0]

    def store(self, state: Float[Tensor, "*latent"]) -> Float[Tensor, "*latent"]:
        """Round a state to the storage dtype.  Clause: ROLL-5."""
        return state.to(self.storage_dtype)


def child_noise(plan: Plan, parent: Node, index: int, tree: Tree, sampling: Sampling) -> Float[Tensor, "*latent"]:
    """ξ of one child: its own draw, correlated with its siblings' at a split.

    Clause: NOISE-1, NOISE-3.  Source: BranchGRPO Eq. 5.
    """
    private = sampling.draw(NoiseRole.PRIVATE, tree.prompt, tree.root_index, parent.depth + 1, index)
    if plan.branching[parent.depth] == 1:
        return private
    shared = sampling.draw(NoiseRole.SHARED, tree.prompt, tree.root_index, parent.depth, parent.index)
    return branch_noise(shared, private, plan.spreads[parent.depth])


def grow_children(tree: Tree, parent: Node, v: Float[Tensor, "*latent"], sampling: Sampling) -> list[Node]:
    """The K children of one parent from the parent's velocity: mean + std·ξ, stored, then scored as stored.

    Clause: ROLL-1, ROLL-5, LOGP-3, LOGP-4, DIV-B2.
    """
    plan, step = tree.plan, parent.depth
    mean, std = transition(plan, step, parent.state.to(sampling.dtype), v)
    children = []
    for branch in range(plan.branching[step]):
        index = parent.index * plan.branching[step] + branch
        noise = child_noise(plan, parent, index, tree, sampling) if std > 0 else torch.zeros_like(mean)
        state = sampling.store(mean + std * noise)
        log_prob = gaussian_log_density(state, mean, std, sampling.reduction) if std > 0 else None
        children.append(Node(step + 1, index, state, parent, mean, std, log_prob))
    return children


def grow(tree: Tree, node: Node, model: VelocityModel, condition: Condition, sampling: Sampling) -> None:
    """Grow the sub-tree under a node: one velocity a parent, shared by its children.  Clause: ROLL-1, ROLL-3."""
    if node.depth == tree.plan.steps:
        return
    where = f"step {node.depth}, node {node.index} of prompt {tree.prompt.id}"
    v = velocity(model, node.state.to(sampling.dtype), tree.plan.sigmas[node.depth], condition, where)
    node.children.extend(grow_children(tree, node, v, sampling))
    for child in node.children:
        grow(tree, child, model, condition, sampling)


@torch.no_grad()
def rollout(plan: Plan, model: VelocityModel, prompt: Prompt, condition: Condition, sampling: Sampling) -> list[Tree]:
    """The R trees of one prompt, each from its own initial noise.

    Clause: ROLL-1 … ROLL-6, NOISE-3, NOISE-4.  Source: BranchGRPO §3.1, Algorithm 1.

    Args:
        plan: what to grow.
        model: velocity model; called once a parent.
        prompt: the prompt; its id keys the noise.
        condition: the prompt's condition, one item.
        sampling: noise, shapes, dtypes, reduction and iteration.

    Returns:
        R trees; a leaf's state is x_T under ``sample`` and x̂⁰ of the last step under ``denoised``.

    Raises:
        InputError, ModelError: see ``velocity``.
    """
    trees = []
    for index in range(plan.roots):
        root = Node(0, 0, sampling.store(sampling.draw(NoiseRole.ROOT, prompt, index, 0, 0)))
        tree = Tree(plan, prompt, index, root)
        grow(tree, root, model, condition, sampling)
        trees.append(tree)
    return trees
