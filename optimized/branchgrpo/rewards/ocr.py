"""How well an image spells the text that its prompt asks for."""

import re
from collections.abc import Callable, Sequence
from importlib.metadata import version

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.base import ImageScorer
from branchgrpo.rewards.extras import require
from branchgrpo.rewards.images import Images
from branchgrpo.rewards.missing import complete

QUOTED = re.compile(r"\"([^\"]+)\"|“([^”]+)”|«([^»]+)»")
Picture = UInt8[np.ndarray, "height width 3"]
Reader = Callable[[Picture], Sequence[str]]
"""Lines of text found in an RGB picture, in reading order."""


def target_text(prompt: Prompt) -> str | None:
    """The quoted parts of a prompt, joined by blanks; None if nothing is quoted."""
    parts = ["".join(groups) for groups in QUOTED.findall(prompt.text)]
    return " ".join(parts) if any(spelling(part) for part in parts) else None


def spelling(text: str) -> str:
    """Letters and digits in lower case: spaces, line breaks and punctuation do not count."""
    return "".join(c for c in text.casefold() if c.isalnum())


def edit_distance(a: str, b: str) -> int:
    """Least number of insertions, deletions and substitutions that turn ``a`` into ``b`` (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def accuracy(target: str, found: str) -> float:
    """1 − distance/length, not below 0.

    Formula: max(0, 1 − lev(s(target), s(found)) / |s(target)|), s keeping letters and digits in lower case.
    """
    want, have = spelling(target), spelling(found)
    return max(0.0, 1.0 - edit_distance(want, have) / len(want))


class OCRAccuracy(ImageScorer):
    """Accuracy of the text that a reader finds, 0 … 1 (Flow-GRPO's text-rendering reward)."""

    range = (0.0, 1.0)

    def __init__(self, reader: Reader, version: str) -> None:
        """Any reader will do; ``rapidocr`` makes the usual one."""
        self.name = "ocr"
        self.reader = reader
        self.version = version

    @classmethod
    def rapidocr(cls) -> "OCRAccuracy":
        """With RapidOCR's bundled models.

        Raises:
            InputError: rapidocr-onnxruntime is not installed.
        """
        engine = require("rapidocr_onnxruntime", "ocr").RapidOCR()

        def read(picture: Picture) -> list[str]:
            result, _ = engine(np.ascontiguousarray(picture[:, :, ::-1]))
            return [line[1] for line in result or []]

        return cls(read, f"rapidocr-onnxruntime {version('rapidocr-onnxruntime')}")

    def score(self, images: Images, prompts: tuple[Prompt, ...]) -> Float[Tensor, "items"]:
        """One image at a time.

        Raises:
            InputError: a prompt that quotes no text, before any image is read.
            MissingScores: the images on which the reader failed.
        """
        for i, prompt in enumerate(prompts):
            if target_text(prompt) is None:
                raise InputError(f"prompts[{i}].text", prompt.text, 'a prompt that quotes the text to write: "…"')
        pictures = (images.pixels.float() * 255.0).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
        scores: list[float | None] = []
        reasons: dict[int, str] = {}
        for i, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
            try:
                scores.append(accuracy(target_text(prompt) or "", " ".join(self.reader(picture))))
            except Exception as error:  # a reader is foreign code; its failure must not take the other scores along
                scores.append(None)
                reasons[i] = f"{type(error).__name__}: {error}"
        return complete(self.name, prompts, scores, reasons)
