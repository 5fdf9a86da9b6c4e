"""PickScore, CLIP score and the aesthetic score, from folders and heads that the tests make."""

import math
from pathlib import Path

import pytest
import torch
from helpers_rewards import TINY, pictures, prompts, random_state, tiny_clip_folder

from branchgrpo.reference.errors import InputError
from branchgrpo.rewards.aesthetic import AestheticScore
from branchgrpo.rewards.clip_encoder import ClipEncoder
from branchgrpo.rewards.clip_rewards import ClipScore, PickScore
from branchgrpo.rewards.linear_head import LinearHead, head_shapes
from branchgrpo.rewards.preprocess import Preprocess

pytest.importorskip("transformers")

FLOAT32 = 1e-6
"""Unit features of two to three float32 layers."""


def cosines(model: object, folder: Path, images: torch.Tensor, texts: list[str]) -> torch.Tensor:
    """What ``CLIPModel.forward`` itself gives, with the attention mask and padding of its own processor."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=TINY.context_length, return_tensors="pt")
    pixels = torch.cat(
        [Preprocess(TINY.image_size, "shortest_crop", quantise=True)(part) for part in chunks_of_one(images)]
    )
    with torch.no_grad():
        out = model(pixel_values=pixels, **tokens)
    return out.logits_per_image.diagonal() / model.logit_scale.exp()


def chunks_of_one(images: torch.Tensor) -> list:
    from branchgrpo.rewards.images import Images

    return [Images(image.unsqueeze(0)) for image in images]


def test_clip_score_is_the_cosine_and_pickscore_scales_it(tmp_path: Path) -> None:
    folder, model = tiny_clip_folder(tmp_path)
    images, texts = pictures(4), prompts()[:4]
    expected = cosines(model, folder, images, [p.text for p in texts]).double()
    clip, pick = ClipScore.load(folder), PickScore.load(folder, None, chunk=3)
    assert (clip(images, texts) - expected).abs().max() < FLOAT32
    assert (pick(images, texts) - expected * math.exp(3.0) / 100.0).abs().max() < FLOAT32
    assert (clip.name, clip.range) == ("clip", (-1.0, 1.0))
    assert pick.name == "pickscore"
    assert pick.range[1] == pytest.approx(math.exp(3.0) / 100.0)
    assert clip.version == pick.version
    assert clip.version.startswith("clip ")
    assert expected.std() > 1e-3


def test_pickscore_may_take_its_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    folder, _ = tiny_clip_folder(tmp_path)
    images, texts = pictures(2), prompts()[:2]
    own = PickScore.load(folder, None)(images, texts)
    other = PickScore.load(folder, tmp_path / "merges.txt")(images, texts)
    assert torch.equal(own, other)


def test_an_encoder_without_tokenizer_embeds_images_only(tmp_path: Path) -> None:
    folder, _ = tiny_clip_folder(tmp_path)
    encoder = ClipEncoder.from_transformers(folder, None)
    assert encoder.image_features(chunks_of_one(pictures(1))[0]).shape == (1, TINY.embed_dim)
    with pytest.raises(InputError, match="tokenizer"):
        encoder.texts(["a"])


def test_aesthetic_is_the_published_stack_of_affine_layers(tmp_path: Path) -> None:
    folder, model = tiny_clip_folder(tmp_path)
    state = random_state(head_shapes(TINY.embed_dim), seed=5)
    torch.save(state, tmp_path / "head.pth")
    reward = AestheticScore.load(tmp_path / "head.pth", folder)
    images = pictures(3)
    pixels = torch.cat([reward.encoder.preprocess(part) for part in chunks_of_one(images)])
    with torch.no_grad():
        x = torch.nn.functional.normalize(model.get_image_features(pixel_values=pixels).pooler_output, dim=-1).double()
    for i in (0, 2, 4, 6, 7):
        x = x @ state[f"layers.{i}.weight"].double().T + state[f"layers.{i}.bias"].double()
    scores = reward(images, prompts()[:3])
    # float32 sums over 1,024 and 128 terms of size about one
    assert (scores - x[:, 0]).abs().max() < 1e-5
    assert scores.std() > 1e-3
    assert torch.equal(scores, reward(images, prompts()[2:5]))
    assert reward.range == (-math.inf, math.inf)
    assert "head.pth" in reward.version


def test_a_head_with_activations_between_its_layers_is_refused() -> None:
    state = random_state(head_shapes(24))
    moved = {key.replace("layers.2.", "layers.3."): t for key, t in state.items()}
    with pytest.raises(InputError, match=r"layers\.2\.bias"):
        LinearHead("relu variant", moved, 24)
    with pytest.raises(InputError, match=r"layers\.0\.weight: shape"):
        LinearHead("other width", state, 25)
