"""The clipped objective over the edges that survived pruning (spec: objective)."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.errors import InputError, PlanError
from branchgrpo.reference.kernels import transition
from branchgrpo.reference.log_probability import gaussian_log_density, ratio
from branchgrpo.reference.normalization import NodeAdvantages
from branchgrpo.reference.options import Objective
from branchgrpo.reference.protocols import Condition, VelocityModel
from branchgrpo.reference.surrogate import clipped_surrogate, gaussian_kl, step_weights
from branchgrpo.reference.tree import Node, Tree
from branchgrpo.reference.types import Reduction
from branchgrpo.reference.velocity import velocity


def trainable_edges(tree: Tree, kept: set[Node]) -> list[Node]:
    """E: kept edges that the causal credit rule lets train; edges with A = 0 stay in.

    Clause: OBJ-3, PLAN-6, ERR-2, DIV-B4, DIV-B9.

    Raises:
        PlanError: nothing is left to train.
    """
    edges = [e for e in tree.edges() if e in kept and e.depth - 1 in tree.plan.trainable_steps]
    if not edges:
        raise PlanError("trained edges", 0, "at least one a tree after pruning")
    return edges


def reduce_edges(terms: Mapping[Node, Float64[Tensor, ""]], reduction: str) -> Float64[Tensor, ""]:
    """Mean over edges, or mean within each depth and then over the depths.

    Clause: OBJ-4, DIV-B10.  Source: BranchGRPO Eq. 9 (edge mean); the depth mean is ours (DIV-P8).
    """
    if reduction == "edge_mean":
        return torch.stack(list(terms.values())).mean()
    depths = sorted({edge.depth for edge in terms})
    return torch.stack([torch.stack([t for e, t in terms.items() if e.depth == d]).mean() for d in depths]).mean()


def edge_means(
    edges: Sequence[Node], tree: Tree, model: VelocityModel, condition: Condition
) -> dict[Node, Float[Tensor, "*latent"]]:
    """Transition mean under ``model`` for every edge, from the stored parent; one call a parent, as in the rollout.

    Clause: OBJ-1, ROLL-3, DIV-G3.
    """
    means: dict[Node, Float[Tensor, "*latent"]] = {}
    for parent in {edge.parent: None for edge in edges}:
        assert parent is not None
        mine = [edge for edge in edges if edge.parent is parent]
        assert mine[0].mean is not None
        x = parent.state.to(mine[0].mean.dtype)
        where = f"step {parent.depth}, node {parent.index} of prompt {tree.prompt.id}"
        v = velocity(model, x, tree.plan.sigmas[parent.depth], condition, where)
        means |= dict.fromkeys(mine, transition(tree.plan, parent.depth, x, v)[0])
    return means


def edge_terms(
    tree: Tree,
    edges: Sequence[Node],
    models: tuple[VelocityModel, VelocityModel | None],
    condition: Condition,
    advantages: NodeAdvantages,
    weights: Mapping[int, float],
    options: Objective,
    reduction: Reduction,
) -> dict[Node, Float64[Tensor, ""]]:
    """w_e·min(ρ A, clip(ρ) A) − β_KL·KL_e for every edge.  Clause: OBJ-1, OBJ-2, OBJ-5, OBJ-6, OBJ-7."""
    policy, frozen = models
    means = edge_means(edges, tree, policy, condition)
    with torch.no_grad():
        references = edge_means(edges, tree, frozen, condition) if frozen is not None else {}
    terms = {}
    for edge in edges:
        assert edge.log_prob is not None
        log_prob = gaussian_log_density(edge.state, means[edge], edge.std, reduction)
        rho = ratio(log_prob, edge.log_prob)
        gain = clipped_surrogate(rho, advantages[edge], options.clip_low, options.clip_high)
        terms[edge] = weights[edge.depth - 1] * gain
        if frozen is not None:
            terms[edge] = terms[edge] - options.kl * gaussian_kl(means[edge], references[edge], edge.std, reduction)
    return terms


def update_stds(trees: Sequence[Tree], kept: set[Node]) -> dict[int, float]:
    """Std of every distinct step that the update trains, over all its trees.  Clause: OBJ-6."""
    return {edge.depth - 1: edge.std for tree in trees for edge in trainable_edges(tree, kept)}


def objective(
    trees: Sequence[Tree],
    model: VelocityModel,
    conditions: Sequence[Condition],
    advantages: NodeAdvantages,
    kept: set[Node],
    options: Objective,
    reduction: Reduction,
    reference_model: VelocityModel | None = None,
) -> Float64[Tensor, ""]:
    """J = mean over trees of the reduced edge terms: to be *maximised*; differentiable in the model's parameters.

    Clause: OBJ-1 … OBJ-8, SING-6.  Source: BranchGRPO Eq. 9; G²RPO Eq. 7 (its trees are the family's members).

    Args:
        trees: the batch; their log-probabilities are the old ones, held fixed over inner epochs.
        model: v_θ.
        conditions: for each tree its prompt's condition, one item.
        advantages: for each node A.
        kept: edges that survived pruning, and the chain subset if the plan has one.
        options: clip range, reduction over edges, step weights, β_KL.
        reduction: the one in which the old log-probabilities were taken.
        reference_model: frozen policy; needed if and only if β_KL > 0.

    Raises:
        InputError: conditions that do not match the trees, or a missing or unused reference model.
        PlanError: a tree with nothing left to train.
    """
    if len(conditions) != len(trees):
        raise InputError("len(conditions)", len(conditions), f"{len(trees)}, one a tree")
    if (reference_model is not None) != (options.kl > 0):
        given = None if reference_model is None else "given"
        raise InputError("reference_model", given, "given if and only if objective.kl > 0")
    weights = step_weights(update_stds(trees, kept), options.edge_weights)
    values = []
    for tree, condition in zip(trees, conditions, strict=True):
        edges, models = trainable_edges(tree, kept), (model, reference_model)
        terms = edge_terms(tree, edges, models, condition, advantages, weights, options, reduction)
        values.append(reduce_edges(terms, options.reduction))
    return torch.stack(values).mean()
