"""The judge of the digits: a support-vector machine, which shares neither family nor images with the reward."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from sklearn.svm import SVC
from torch import Tensor

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.digits import as_images, digit_of


class DigitJudge:
    """Reads digits with a support-vector machine (RBF kernel); never part of a reward: nothing optimises it."""

    name = "svc-rbf"

    def __init__(self, images: Float[Tensor, "items 1 8 8"], labels: Int64[Tensor, "items"]) -> None:
        self.machine = SVC(kernel="rbf", C=10.0, gamma="scale")
        self.machine.fit(pixels(images), labels.numpy())

    def read(self, samples: Float[Tensor, "items *sample"]) -> Int64[Tensor, "items"]:
        """The digit that the judge reads in every sample.

        Raises:
            InputError: samples that are not 64 pixels, or not finite.
        """
        if not bool(torch.isfinite(samples).all()):
            raise InputError("samples", "NaN or ±inf", "finite")
        return torch.from_numpy(np.asarray(self.machine.predict(pixels(samples)), dtype=np.int64))

    def accuracy(self, samples: Float[Tensor, "items *sample"], prompts: Sequence[Prompt]) -> float:
        """Share of the samples that are read as the digit of their prompt.

        Raises:
            InputError: no samples, or another number of prompts.
        """
        if len(prompts) == 0 or len(prompts) != samples.shape[0]:
            raise InputError("len(prompts)", len(prompts), f"{samples.shape[0]} ≥ 1, one a sample")
        wanted = torch.tensor([digit_of(prompt) for prompt in prompts], dtype=torch.int64)
        return math.fsum((self.read(samples) == wanted).tolist()) / len(prompts)


def pixels(samples: Float[Tensor, "items *sample"]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Samples as rows of 64 pixels in [−1, 1]."""
    rows: np.ndarray[tuple[int, int], np.dtype[np.float64]] = as_images(samples).double().flatten(1).cpu().numpy()
    return rows
