"""A folder of images: those that lie in a sub-folder belong to the prompt that it is named after."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from branchgrpo.reference.errors import InputError, is_integer
from branchgrpo.rewards.diversity.features import FeatureExtractor
from branchgrpo.rewards.extras import require
from branchgrpo.rewards.images import Images

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """Images in the order of their paths, of any sizes, and the prompt of each (its sub-folder, or the empty name)."""

    path: Path
    files: tuple[Path, ...]
    prompts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, item: int) -> Float[Tensor, "1 3 height width"]:
        """One image, values in [0, 1].

        Raises:
            InputError: a file that cannot be read as an image.
        """
        pillow = require("PIL.Image", "rewards")
        try:
            with pillow.open(self.files[item]) as image:
                levels = torch.from_numpy(np.array(image.convert("RGB")))
        except OSError as error:
            raise InputError(str(self.files[item]), str(error), "a readable image") from error
        return (levels.permute(2, 0, 1).float() / 255.0).unsqueeze(0)


@dataclass(frozen=True, eq=False)
class FolderFeatures:
    """Features of a folder.

    Attributes:
        vectors: of every image.
        prompts: of every image.
        maps: of at most ``map_limit`` images, drawn at random, since maps are large and their pairs many.
    """

    vectors: Float64[Tensor, "items dim"]
    prompts: tuple[str, ...]
    maps: tuple[Tensor, ...]


def open_folder(path: str | Path) -> ImageFolder:
    """All images in a folder and its sub-folders.

    Raises:
        InputError: no such folder, or fewer than two images in it.
    """
    root = Path(path)
    if not root.is_dir():
        raise InputError("folder", str(path), "an existing folder")
    files = tuple(sorted(f for f in root.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file()))
    if len(files) < 2:
        raise InputError(f"images in {path}", len(files), "≥ 2")
    return ImageFolder(root, files, tuple(f.parent.relative_to(root).as_posix() for f in files))


def extract(
    folder: ImageFolder, features: FeatureExtractor, generator: torch.Generator, map_limit: int = 256
) -> FolderFeatures:
    """Features of every image, read one at a time, so that images may differ in size.

    Args:
        folder: images.
        features: extractor.
        generator: draws the images whose maps are kept.
        map_limit: images whose maps are kept, ≥ 2.
    """
    if not is_integer(map_limit) or map_limit < 2:
        raise InputError("map_limit", map_limit, "an integer ≥ 2")
    chosen = set(torch.randperm(len(folder), generator=generator)[:map_limit].tolist())
    vectors: list[Tensor] = []
    maps: list[tuple[Tensor, ...]] = []
    for item in range(len(folder)):
        image = Images(folder.read(item))
        vectors.append(features.vectors(image))
        if item in chosen:
            maps.append(features.maps(image))
    levels = tuple(torch.cat(level) for level in zip(*maps, strict=True))
    return FolderFeatures(torch.cat(vectors), folder.prompts, levels)
