"""Diversity of two sets of images and the drift between them, in one value."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.reference.errors import InputError
from branchgrpo.rewards.diversity.folder import FolderFeatures
from branchgrpo.rewards.diversity.kernel_distance import KernelDistance, kid, polynomial_mmd2
from branchgrpo.rewards.diversity.perceptual import mean_pairwise, perceptual_distances
from branchgrpo.rewards.diversity.spectral import truncated_entropy, vendi_score
from branchgrpo.rewards.diversity.spread import prompt_spread


@dataclass(frozen=True)
class SetDiversity:
    """Diversity within one set.

    Attributes:
        items: images.
        mean_pairwise_distance: LPIPS-style, over all pairs of ``pairwise_items`` images.
        pairwise_items: images whose pairs were compared.
        truncated_entropy: of ``entropy_rank`` principal variances; None where the set has too few images or too low a
            rank for one.
        entropy_rank: K.
        vendi: effective number of images.
        prompt_spread: mean over prompts of the mean squared distance within a prompt; None where no prompt has two.
        prompts: prompts with at least two images.
    """

    items: int
    mean_pairwise_distance: float
    pairwise_items: int
    truncated_entropy: float | None
    entropy_rank: int
    vendi: float
    prompt_spread: float | None
    prompts: int


@dataclass(frozen=True)
class DiversityReport:
    """Two sets and the drift from one to the other."""

    features: str
    a: SetDiversity
    b: SetDiversity
    kid: KernelDistance
    mmd2: float
    seed: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def entropy_or_none(vectors: Float64[Tensor, "items dim"], rank: int) -> float | None:
    """Truncated entropy, None where it is not defined."""
    try:
        return truncated_entropy(vectors, rank)
    except InputError:
        return None


def set_diversity(found: FolderFeatures, rank: int) -> SetDiversity:
    """All measures of one set."""
    try:
        spreads = prompt_spread(found.vectors, found.prompts)
    except InputError:
        spreads = {}
    return SetDiversity(
        items=len(found.vectors),
        mean_pairwise_distance=mean_pairwise(perceptual_distances(found.maps)),
        pairwise_items=len(found.maps[0]),
        truncated_entropy=entropy_or_none(found.vectors, rank),
        entropy_rank=rank,
        vendi=vendi_score(found.vectors),
        prompt_spread=sum(spreads.values()) / len(spreads) if spreads else None,
        prompts=len(spreads),
    )


def compare(
    a: FolderFeatures,
    b: FolderFeatures,
    features: str,
    *,
    rank: int = 20,
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 0,
) -> DiversityReport:
    """Diversity of both sets, KID and polynomial MMD² between them.

    Args:
        a, b: features of the two sets, by the same extractor.
        features: its name, for the report.
        rank: K of the truncated entropy.
        subsets, subset_size: of KID.
        seed: of KID's subsets.
    """
    generator = torch.Generator().manual_seed(seed)
    return DiversityReport(
        features=features,
        a=set_diversity(a, rank),
        b=set_diversity(b, rank),
        kid=kid(a.vectors, b.vectors, generator, subsets=subsets, subset_size=subset_size),
        mmd2=polynomial_mmd2(a.vectors, b.vectors),
        seed=seed,
    )
