"""What every reward on images shares: one checked entrance, one float64 exit."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.errors import RewardError
from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.images import Images, as_images, as_prompts


class ImageScorer(ABC):
    """A reward of one image and its prompt (REW-1, REW-3, REW-6).

    Attributes:
        name: of the reward model, for logs.
        version: what else decides the score: weights, template, backend.
        range: the values a score can take; infinite where the head is unbounded.
    """

    name: str
    version: str
    range: tuple[float, float]

    def __call__(self, samples: Tensor | Images, prompts: Sequence[Prompt]) -> Float64[Tensor, "items"]:
        """Reward i is that of image i under ``prompts[i]``.  Clause: REW-1, REW-3, REW-6.

        Args:
            samples: images [items, 3, height, width], values in [0, 1].
            prompts: one an item.

        Raises:
            InputError: swapped, mismatched or out-of-range arguments.
            RewardError: a score of the wrong length.
            MissingScores: an item without a score, with the scores of the others (remote judges, OCR).
        """
        images = as_images(samples)
        checked = as_prompts(prompts, len(images))
        if not checked:
            return torch.zeros(0, dtype=torch.float64, device=images.pixels.device)
        with torch.no_grad():
            scores = self.score(images, checked)
        if scores.shape != (len(images),):
            raise RewardError(f"scores of {self.name}: shape", tuple(scores.shape), f"({len(images)},), one an item")
        return scores.to(images.pixels.device, torch.float64)

    @abstractmethod
    def score(self, images: Images, prompts: tuple[Prompt, ...]) -> Float[Tensor, "items"]:
        """Scores in any floating-point precision, on any device."""
