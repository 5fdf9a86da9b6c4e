"""Small models, tokenizers and pictures that the reward tests make for themselves."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.open_clip_keys import OpenClipShape, clip_config, convert_open_clip, open_clip_shapes
from branchgrpo.rewards.tokenizer import tokenizer_of_merges

MERGES = ["a t</w>", "c at</w>", "d o", "do g</w>", "r e", "re d</w>", "t h"]
TINY = OpenClipShape(
    embed_dim=24,
    image_size=28,
    patch_size=14,
    vision_width=48,
    vision_layers=3,
    vision_heads=3,
    text_width=32,
    text_layers=2,
    text_heads=4,
    context_length=16,
    vocab_size=256 + 256 + len(MERGES) + 2,
)
TEXTS = ["a red cat", "a dog", "A CAT and a dog, red & 12!", "", "cat " * 40]


def prompts(texts: Sequence[str] = TEXTS) -> list[Prompt]:
    return [Prompt(10 + i, text) for i, text in enumerate(texts)]


def pictures(count: int, height: int = 30, width: int = 22, seed: int = 0) -> Tensor:
    """Random images in [0, 1] on the 8-bit grid, as a file holds them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, height, width), generator=generator).float() / 255.0


def write_merges(folder: Path) -> Path:
    path = folder / "merges.txt"
    path.write_text("\n".join(["header", *MERGES]) + "\n", encoding="utf-8")
    return path


def random_state(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of given shapes, of a size at which every part of a transformer matters."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator)
        fan_in = shape[-1] if len(shape) > 1 else 1
        is_scale = name.endswith(("ln_1.weight", "ln_2.weight", "norm1.weight", "norm2.weight", "LayerNorm.weight"))
        state[name] = (
            1.0 + 0.2 * tensor if is_scale or "ln_" in name else tensor * (0.5 if fan_in == 1 else fan_in**-0.5)
        )
    return state


def tiny_open_clip(folder: Path, seed: int = 0) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint as HPS publishes it, of the tiny shape, and its tensors."""
    state = random_state(open_clip_shapes(TINY), seed)
    state["logit_scale"] = torch.tensor(3.0)
    path = folder / "HPS_tiny.pt"
    torch.save({"epoch": 1, "state_dict": state}, path)
    return path, state


def tiny_clip_folder(folder: Path, seed: int = 0) -> tuple[Path, Any]:
    """A transformers CLIP with its tokenizer, saved as a folder, and the model."""
    from transformers import CLIPModel

    state = random_state(open_clip_shapes(TINY), seed)
    state["logit_scale"] = torch.tensor(3.0)
    model = CLIPModel(clip_config(TINY))
    model.load_state_dict(convert_open_clip("tiny", state, TINY))
    target = folder / "clip"
    model.save_pretrained(target)
    tokenizer_of_merges(write_merges(folder)).save_pretrained(target)
    assert json.loads((target / "config.json").read_text())["model_type"] == "clip"
    return target, model.eval()


class Recorder:
    """A reward on anything that counts its calls: the sum of a sample plus a thousand times its prompt's id."""

    version = "test"
    range = (-float("inf"), float("inf"))

    def __init__(self, name: str = "recorder") -> None:
        self.name = name
        self.sizes: list[int] = []

    def __call__(self, samples: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        self.sizes.append(len(samples))
        ids = torch.tensor([prompt.id for prompt in prompts], dtype=torch.float64)
        return samples.double().flatten(1).sum(dim=1) + 1000.0 * ids
