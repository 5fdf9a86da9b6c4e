"""Log-probabilities of edges and paths, and ratios (spec: log_probability)."""

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.tree import Node
from branchgrpo.reference.types import Reduction


def reduce_elements(per_element: Float[Tensor, "*latent"], reduction: Reduction) -> Float64[Tensor, ""]:
    """Sum or mean over the D latent elements, accumulated in float64.  Clause: LOGP-2, LOGP-5."""
    elements = per_element.double()
    return elements.sum() if reduction is Reduction.SUM else elements.mean()


def gaussian_log_density(
    child: Float[Tensor, "*latent"], mean: Float[Tensor, "*latent"], std: float, reduction: Reduction
) -> Float64[Tensor, ""]:
    """log N(child; mean, std²·I): −(x − μ)²/(2 std²) − log std − ½ log 2π an element, then the reduction.

    Clause: LOGP-1 … LOGP-3, LOGP-5, DIV-M4, DIV-M5.  Source: Flow-GRPO Eq. 10; BranchGRPO §3.

    Args:
        child: the child *as stored* (realised-action rule).
        mean: transition mean.
        std: the std by which the noise was really scaled, > 0.
        reduction: ``sum`` is the true density, ``mean`` what public code uses.
    """
    z = (child.double() - mean.double()) / std
    return reduce_elements(-0.5 * z * z - math.log(std) - 0.5 * math.log(2.0 * math.pi), reduction)


def path_log_probability(leaf: Node, ancestor: Node) -> Float64[Tensor, ""]:
    """log p_beh(ℓ | n): the edges' log-probabilities from n down to ℓ, where they have one.  Clause: LOGP-6."""
    total = torch.zeros((), dtype=torch.float64)
    node = leaf
    while node is not ancestor:
        if node.log_prob is not None:
            total = total + node.log_prob
        assert node.parent is not None, "the leaf does not descend from the ancestor"
        node = node.parent
    return total


def ratio(log_prob: Float64[Tensor, "*edges"], old_log_prob: Float64[Tensor, "*edges"]) -> Float64[Tensor, "*edges"]:
    """ρ = exp(log p_θ − log p_old).  Clause: OBJ-1.  Source: BranchGRPO Eq. 9; G²RPO Eq. 7."""
    return torch.exp(log_prob - old_log_prob)
