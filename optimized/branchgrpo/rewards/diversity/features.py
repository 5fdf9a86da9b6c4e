"""What images are compared by: any extractor of vectors and maps; pixels and CLIP are at hand."""

from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn import functional

from branchgrpo.reference.errors import InputError, is_integer
from branchgrpo.rewards.clip_encoder import ClipEncoder
from branchgrpo.rewards.images import Images
from branchgrpo.rewards.open_clip_keys import VIT_H_14
from branchgrpo.rewards.preprocess import Preprocess


class FeatureExtractor(Protocol):
    """Turns images into vectors, and into feature maps of several scales or depths."""

    name: str

    def vectors(self, images: Images) -> Float64[Tensor, "items dim"]:
        """One vector an image."""
        ...

    def maps(self, images: Images) -> tuple[Float[Tensor, "items _channels _rows _columns"], ...]:
        """Feature maps, coarse or deep ones last."""
        ...


class PixelFeatures:
    """The pixels themselves, at a small size; maps are the image and its halvings.  Needs no weights."""

    def __init__(self, size: int = 32) -> None:
        """``size``: side in pixels, a multiple of 4."""
        if not is_integer(size) or size < 4 or size % 4:
            raise InputError("features.size", size, "a multiple of 4")
        self.name = f"pixels {size}"
        self.preprocess = Preprocess(size, "shortest_crop", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))

    def vectors(self, images: Images) -> Float64[Tensor, "items dim"]:
        """All pixels of an image in [−1, 1]."""
        return self.preprocess(images).double().flatten(1)

    def maps(self, images: Images) -> tuple[Float[Tensor, "items _channels _rows _columns"], ...]:
        """The image, its half and its quarter."""
        full = self.preprocess(images)
        return full, functional.avg_pool2d(full, 2), functional.avg_pool2d(full, 4)


class ClipFeatures:
    """CLIP's unit image embeddings; maps are the patch tokens after evenly spread layers."""

    def __init__(self, encoder: ClipEncoder, layers: int = 4) -> None:
        """``layers``: how many of the image tower's layers give maps, at most all of them."""
        if not is_integer(layers) or layers < 1:
            raise InputError("features.layers", layers, "an integer ≥ 1")
        self.name = f"clip {encoder.version}"
        self.encoder = encoder
        depth = encoder.model.config.vision_config.num_hidden_layers
        count = min(layers, depth)
        self.depths = tuple(depth * (i + 1) // count for i in range(count))

    def vectors(self, images: Images) -> Float64[Tensor, "items dim"]:
        """Unit embeddings."""
        with torch.no_grad():
            return self.encoder.images(images).double()

    def maps(self, images: Images) -> tuple[Float[Tensor, "items _channels _rows _columns"], ...]:
        """Patch tokens of the chosen layers on their grid; the class token is left out."""
        model = self.encoder.model
        parts: list[list[Tensor]] = [[] for _ in self.depths]
        for chunk in images.chunks(self.encoder.chunk):
            pixels = self.encoder.preprocess(chunk).to(model.device, model.dtype)
            with torch.no_grad():
                hidden = model.vision_model(pixel_values=pixels, output_hidden_states=True).hidden_states
            for part, depth in zip(parts, self.depths, strict=True):
                patches = hidden[depth][:, 1:].float()
                side = round(patches.shape[1] ** 0.5)
                part.append(patches.transpose(1, 2).reshape(len(chunk), -1, side, side))
        return tuple(torch.cat(part) for part in parts)


def image_encoder(source: str) -> ClipEncoder:
    """A CLIP that embeds images: an open_clip ViT-H-14 checkpoint file, or a transformers folder or hub id."""
    if Path(source).is_file():
        return ClipEncoder.from_open_clip(
            source, None, preprocess=Preprocess(VIT_H_14.image_size, "shortest_crop", quantise=True)
        )
    return ClipEncoder.from_transformers(source, None)
