"""scikit-learn's handwritten digits, cut into three disjoint, stratified thirds."""

from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from branchgrpo.reference.errors import OptionError, is_integer

PARTS = ("generator", "classifier", "judge")


@dataclass(frozen=True, eq=False)
class DigitImages:
    """Images in [−1, 1], their digits, and their rows in the full data set."""

    images: Float32[Tensor, "items 1 8 8"]
    labels: Int64[Tensor, "items"]
    rows: Int64[Tensor, "items"]

    def __len__(self) -> int:
        return self.images.shape[0]


@dataclass(frozen=True)
class SplitConfig:
    """Seed of the cut."""

    seed: int = 0

    def __post_init__(self) -> None:
        if not is_integer(self.seed) or not 0 <= self.seed < 2**32:
            raise OptionError("split.seed", self.seed, "an integer in 0..2^32 − 1")


def load_part(part: str, config: SplitConfig | None = None) -> DigitImages:
    """One third of the 1,797 images (UCI optical recognition of handwritten digits, as scikit-learn ships them).

    The generator learns from one third, the reward's classifier from another, and the judge from the last: none has
    seen an image of the others'.

    Args:
        part: whose third: ``generator``, ``classifier`` or ``judge``.
        config: seed of the cut.

    Raises:
        OptionError: an unknown part.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import StratifiedKFold

    if part not in PARTS:
        raise OptionError("part", part, f"one of {list(PARTS)}")
    data = load_digits()
    folds = StratifiedKFold(n_splits=len(PARTS), shuffle=True, random_state=(config or SplitConfig()).seed)
    rows = list(folds.split(data.data, data.target))[PARTS.index(part)][1]
    images = torch.from_numpy(data.images[rows]).float() / 8.0 - 1.0  # pixels are 0 … 16
    return DigitImages(images.unsqueeze(1), torch.from_numpy(data.target[rows]).long(), torch.from_numpy(rows).long())
