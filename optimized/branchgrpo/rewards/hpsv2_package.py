"""The ``hpsv2`` package itself behind the interface of the other rewards: its model, transform and tokenizer."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.base import ImageScorer
from branchgrpo.rewards.checkpoint import find_checkpoint, fingerprint, read_state_dict
from branchgrpo.rewards.clip_rewards import HPS_CHECKPOINT
from branchgrpo.rewards.extras import require
from branchgrpo.rewards.images import Images

INSTALL = "pip install --no-deps hpsv2x==1.2.0 && pip install clint ftfy regex requests timm torchvision"


class HPSv2Package(ImageScorer):
    """HPS v2.x computed by the package's own network, image transform and tokenizer.

    The checkpoint is read once (the package's ``score`` reads it at every call), and nothing else is downloaded.
    """

    range = (-1.0, 1.0)

    def __init__(
        self,
        checkpoint: str | Path = HPS_CHECKPOINT,
        *,
        architecture: str = "ViT-H-14",
        device: torch.device | str = "cpu",
    ) -> None:
        """Build the package's model.

        Args:
            checkpoint: HPS v2.x state dict, local or on the hub.
            architecture: name of an open_clip configuration known to the package.
            device: of the network.

        Raises:
            InputError: the package is not installed, with the line that installs it.
        """
        try:
            package: Any = import_module("hpsv2.src.open_clip")
        except ImportError as error:
            raise InputError("hpsv2", str(error), f"importable: {INSTALL}") from error
        path = find_checkpoint(checkpoint)
        model, _, transform = package.create_model_and_transforms(
            architecture, precision="fp32", device=device, light_augmentation=True, output_dict=True
        )
        model.load_state_dict(read_state_dict(path))
        self.model: Any = model.eval().requires_grad_(False)
        self.transform: Any = transform
        self.tokenizer: Any = package.get_tokenizer(architecture)
        self.device = torch.device(device)
        self.name = "hps_v2.1_package"
        self.version = f"{path.name} {fingerprint(path)}, {package_version()}"

    def score(self, images: Images, prompts: tuple[Prompt, ...]) -> Float[Tensor, "items"]:
        """One image at a time, as the package does."""
        pillow = require("PIL.Image", "rewards")
        scores = []
        for pixels, prompt in zip(images.pixels, prompts, strict=True):
            levels = (pixels.float() * 255.0).round().byte().permute(1, 2, 0).cpu().numpy()
            image = self.transform(pillow.fromarray(levels)).unsqueeze(0).to(self.device)
            found = self.model(image, self.tokenizer([prompt.text]).to(self.device))
            scores.append((found["image_features"] * found["text_features"]).sum())
        return torch.stack(scores)


def package_version() -> str:
    """Name and version of the installed distribution."""
    for name in ("hpsv2x", "hpsv2"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "hpsv2 of unknown version"
