"""ImageReward: key mapping and scores against BLIP's forward pass written out from the checkpoint's own names."""

import math
from pathlib import Path

import pytest
import torch
from helpers_rewards import pictures, prompts, random_state
from torch import Tensor
from torch.nn import functional

from branchgrpo.reference.errors import InputError
from branchgrpo.rewards.blip_keys import BlipShape, blip_configs, convert_image_reward, image_reward_shapes
from branchgrpo.rewards.image_reward import ImageReward
from branchgrpo.rewards.images import Images

transformers = pytest.importorskip("transformers")

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "red",
    "cat",
    "dog",
    "and",
    ",",
    "&",
    "!",
    "12",
    "[DEC]",
    "[ENC]",
]
TINY = BlipShape(
    image_size=32,
    patch_size=16,
    vision_width=24,
    vision_layers=2,
    vision_heads=3,
    text_width=16,
    text_layers=2,
    text_heads=2,
    vocab_size=len(WORDS),
    positions=40,
)
FLOAT64 = 1e-10
"""Two layers of each tower in float64."""

FLOAT32 = 1e-5
"""Of the size of the score: two layers of each tower, and a head in float32 that sums 1,024 terms."""


def affine(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def norm(state: dict[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(x, (x.shape[-1],), state[f"{name}.weight"], state[f"{name}.bias"], eps)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, keep: Tensor | None = None) -> Tensor:
    n, length, width = q.shape
    q, k, v = (t.reshape(n, -1, heads, width // heads).transpose(1, 2) for t in (q, k, v))
    logits = q @ k.transpose(2, 3) / math.sqrt(width // heads)
    if keep is not None:
        logits = logits.masked_fill(~keep[:, None, None, :], -1e30)
    return (logits.softmax(dim=-1) @ v).transpose(1, 2).reshape(n, length, width)


def image_tower(state: dict[str, Tensor], pixels: Tensor) -> Tensor:
    root, p = "blip.visual_encoder", TINY.patch_size
    patches = pixels.unfold(2, p, p).unfold(3, p, p).permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)
    kernel = state[f"{root}.patch_embed.proj.weight"].flatten(1)
    tokens = patches @ kernel.T + state[f"{root}.patch_embed.proj.bias"]
    x = torch.cat([state[f"{root}.cls_token"].expand(len(pixels), -1, -1), tokens], dim=1) + state[f"{root}.pos_embed"]
    for i in range(TINY.vision_layers):
        at = f"{root}.blocks.{i}"
        q, k, v = affine(state, f"{at}.attn.qkv", norm(state, f"{at}.norm1", x, 1e-6)).split(TINY.vision_width, dim=-1)
        x = x + affine(state, f"{at}.attn.proj", attention(q, k, v, TINY.vision_heads))
        hidden = gelu(affine(state, f"{at}.mlp.fc1", norm(state, f"{at}.norm2", x, 1e-6)))
        x = x + affine(state, f"{at}.mlp.fc2", hidden)
    return norm(state, f"{root}.norm", x, 1e-6)


def text_tower(state: dict[str, Tensor], ids: Tensor, keep: Tensor, seen: Tensor) -> Tensor:
    root = "blip.text_encoder"
    x = state[f"{root}.embeddings.word_embeddings.weight"][ids]
    x = x + state[f"{root}.embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = norm(state, f"{root}.embeddings.LayerNorm", x, 1e-12)
    for i in range(TINY.text_layers):
        for name, source, mask in (("attention", None, keep), ("crossattention", seen, None)):
            at = f"{root}.encoder.layer.{i}.{name}"
            other = x if source is None else source
            q, k, v = (
                affine(state, f"{at}.self.{part}", y) for part, y in (("query", x), ("key", other), ("value", other))
            )
            mixed = affine(state, f"{at}.output.dense", attention(q, k, v, TINY.text_heads, mask))
            x = norm(state, f"{at}.output.LayerNorm", mixed + x, 1e-12)
        at = f"{root}.encoder.layer.{i}"
        hidden = affine(state, f"{at}.output.dense", gelu(affine(state, f"{at}.intermediate.dense", x)))
        x = norm(state, f"{at}.output.LayerNorm", hidden + x, 1e-12)
    return x


def score(state: dict[str, Tensor], pixels: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    x = text_tower(state, ids, keep, image_tower(state, pixels))[:, 0]
    for i in (0, 2, 4, 6, 7):
        x = affine(state, f"mlp.layers.{i}", x)
    return (x[:, 0] - 0.16717362830052426) / 1.0333394966054072


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Path, dict[str, Tensor]]:
    state = random_state(image_reward_shapes(TINY), seed=7)
    extra = {
        "blip.text_encoder.embeddings.position_ids": torch.arange(40)[None],
        "blip.text_proj.weight": torch.ones(2, 2),
    }
    torch.save(state | extra, tmp_path / "ImageReward.pt")
    folder = tmp_path / "bert"
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    return tmp_path / "ImageReward.pt", folder, state


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scores_equal_the_forward_pass_written_out(
    checkpoint: tuple[Path, Path, dict[str, Tensor]], dtype: torch.dtype
) -> None:
    path, folder, state = checkpoint
    reward = ImageReward.load(path, folder, shape=TINY, dtype=dtype, chunk=2)
    exact = {name: tensor.double() for name, tensor in state.items()}
    images, texts = pictures(5, 37, 41), prompts()
    tokens = reward.tokenizer([p.text for p in texts], padding="max_length", truncation=True, max_length=35)
    ids, keep = torch.tensor(tokens["input_ids"]), torch.tensor(tokens["attention_mask"]).bool()
    assert ids[0, :6].tolist() == [2, 5, 6, 7, 3, 0]
    expected = score(exact, reward.preprocess(Images(images.double())), ids, keep)
    found = reward(images, texts)
    assert (found - expected).abs().max() < FLOAT32 * max(1.0, float(expected.abs().max()))
    assert found.std() > 0.05
    assert (found - found[[1, 0, 2, 3, 4]]).abs().max() > 1e-3
    assert reward.name == "image_reward"
    assert "ImageReward.pt" in reward.version


def test_towers_equal_to_float64_rounding(checkpoint: tuple[Path, Path, dict[str, Tensor]]) -> None:
    path, folder, state = checkpoint
    reward = ImageReward.load(path, folder, shape=TINY, dtype=torch.float64)
    exact = {name: tensor.double() for name, tensor in state.items()}
    pixels = reward.preprocess(Images(pictures(2, 32, 32).double()))
    ids, keep = (
        torch.tensor([[2, 5, 6, 3, 0, 0], [2, 7, 3, 0, 0, 0]]),
        torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]]),
    )
    seen = reward.vision(pixel_values=pixels).last_hidden_state
    assert (seen - image_tower(exact, pixels)).abs().max() < FLOAT64
    read = reward.text(
        input_ids=ids, attention_mask=keep, encoder_hidden_states=seen, encoder_attention_mask=torch.ones(2, 5).long()
    ).last_hidden_state
    expected = text_tower(exact, ids, keep.bool(), seen)
    assert (read[:, 0] - expected[:, 0]).abs().max() < FLOAT64


def test_full_size_names_and_shapes_without_weights() -> None:
    shape = BlipShape()
    with torch.device("meta"):
        vision_config, text_config = blip_configs(shape)
        vision = transformers.BlipVisionModel(vision_config)
        text = transformers.BlipTextModel(text_config, add_pooling_layer=False)
        state = {name: torch.empty(s) for name, s in image_reward_shapes(shape).items()}
    parts = convert_image_reward("meta", state, shape)
    for found, model in zip(parts, (vision, text), strict=False):
        assert {k: tuple(t.shape) for k, t in found.items()} == {
            k: tuple(t.shape) for k, t in model.state_dict().items()
        }
    assert parts[2]["layers.0.weight"].shape == (1024, 768)
    vit_large = 303_301_632
    embeddings = 30_524 * 768 + 512 * 768 + 2 * 768
    bert_layer = 7_087_872
    to_the_image = 2 * (768 * 768 + 768) + 2 * (1024 * 768 + 768) + 2 * 768
    head = sum((a + 1) * b for a, b in ((768, 1024), (1024, 128), (128, 64), (64, 16), (16, 1)))
    total = vit_large + embeddings + 12 * (bert_layer + to_the_image) + head
    assert sum(t.numel() for t in state.values()) == total


def test_one_wrong_tensor_is_named(checkpoint: tuple[Path, Path, dict[str, Tensor]]) -> None:
    _, _, state = checkpoint
    key = "blip.text_encoder.encoder.layer.1.crossattention.self.key.weight"
    for change, named in (({key: None}, key), ({"x": torch.zeros(1)}, "'x'"), ({key: state[key][:3]}, f"{key}: shape")):
        broken = {name: t for name, t in (state | change).items() if t is not None}
        with pytest.raises(InputError, match=named):
            convert_image_reward("broken", broken, TINY)
