"""HPS v2.1: key mapping, features against open_clip's forward pass written out, tokenizer, faults of checkpoints."""

import math
from pathlib import Path

import pytest
import torch
from helpers_rewards import TEXTS, TINY, pictures, prompts, tiny_open_clip, write_merges
from torch import Tensor
from torch.nn import functional

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Prompt
from branchgrpo.rewards.checkpoint import find_checkpoint, fingerprint, read_state_dict
from branchgrpo.rewards.clip_rewards import HPSv21
from branchgrpo.rewards.images import Images
from branchgrpo.rewards.open_clip_keys import (
    VIT_H_14,
    OpenClipShape,
    clip_config,
    convert_open_clip,
    open_clip_shapes,
)
from branchgrpo.rewards.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")

FLOAT32 = 1e-6
"""Unit features of two to three float32 layers; rounding is about 1e-7 a layer."""

FLOAT64 = 1e-12
"""The same in float64, where rounding is 1e-16 a layer."""


def block(state: dict[str, Tensor], prefix: str, x: Tensor, heads: int, causal: bool) -> Tensor:
    """One residual block, from the tensors as open_clip names them."""
    n, length, width = x.shape
    y = functional.layer_norm(x, (width,), state[f"{prefix}.ln_1.weight"], state[f"{prefix}.ln_1.bias"], 1e-5)
    qkv = y @ state[f"{prefix}.attn.in_proj_weight"].T + state[f"{prefix}.attn.in_proj_bias"]
    q, k, v = (t.reshape(n, length, heads, width // heads).transpose(1, 2) for t in qkv.split(width, dim=-1))
    logits = q @ k.transpose(2, 3) / math.sqrt(width // heads)
    if causal:
        logits = logits + torch.full((length, length), -math.inf, dtype=x.dtype).triu(1)
    mixed = (logits.softmax(dim=-1) @ v).transpose(1, 2).reshape(n, length, width)
    x = x + mixed @ state[f"{prefix}.attn.out_proj.weight"].T + state[f"{prefix}.attn.out_proj.bias"]
    y = functional.layer_norm(x, (width,), state[f"{prefix}.ln_2.weight"], state[f"{prefix}.ln_2.bias"], 1e-5)
    hidden = y @ state[f"{prefix}.mlp.c_fc.weight"].T + state[f"{prefix}.mlp.c_fc.bias"]
    gelu = 0.5 * hidden * (1.0 + torch.erf(hidden / math.sqrt(2.0)))
    return x + gelu @ state[f"{prefix}.mlp.c_proj.weight"].T + state[f"{prefix}.mlp.c_proj.bias"]


def image_features(state: dict[str, Tensor], shape: OpenClipShape, pixels: Tensor) -> Tensor:
    """open_clip's image tower."""
    p, width = shape.patch_size, shape.vision_width
    patches = pixels.unfold(2, p, p).unfold(3, p, p).permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)
    tokens = patches @ state["visual.conv1.weight"].flatten(1).T
    start = state["visual.class_embedding"].expand(len(pixels), 1, width)
    x = torch.cat([start, tokens], dim=1) + state["visual.positional_embedding"]
    x = functional.layer_norm(x, (width,), state["visual.ln_pre.weight"], state["visual.ln_pre.bias"], 1e-5)
    for i in range(shape.vision_layers):
        x = block(state, f"visual.transformer.resblocks.{i}", x, shape.vision_heads, causal=False)
    x = functional.layer_norm(x[:, 0], (width,), state["visual.ln_post.weight"], state["visual.ln_post.bias"], 1e-5)
    return functional.normalize(x @ state["visual.proj"], dim=-1)


def text_features(state: dict[str, Tensor], shape: OpenClipShape, ids: Tensor) -> Tensor:
    """open_clip's text tower, read at the first place of the largest id, padded with zeros as open_clip pads."""
    end = ids.argmax(dim=-1)
    ids = torch.where(torch.arange(ids.shape[1]) > end[:, None], torch.zeros_like(ids), ids)
    x = state["token_embedding.weight"][ids] + state["positional_embedding"]
    for i in range(shape.text_layers):
        x = block(state, f"transformer.resblocks.{i}", x, shape.text_heads, causal=True)
    x = functional.layer_norm(x, (shape.text_width,), state["ln_final.weight"], state["ln_final.bias"], 1e-5)
    return functional.normalize(x[torch.arange(len(ids)), end] @ state["text_projection"], dim=-1)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, dict[str, Tensor]]:
    checkpoint, state = tiny_open_clip(tmp_path)
    return checkpoint, write_merges(tmp_path), state


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FLOAT32), (torch.float64, FLOAT64)])
def test_features_equal_open_clip(
    files: tuple[Path, Path, dict[str, Tensor]], dtype: torch.dtype, tolerance: float
) -> None:
    checkpoint, merges, state = files
    reward = HPSv21.load(checkpoint, merges, shape=TINY, dtype=dtype)
    exact = {name: tensor.double() for name, tensor in state.items()}
    images = Images(pictures(4).to(dtype))
    expected_image = image_features(exact, TINY, reward.encoder.preprocess(images).double())
    assert reward.encoder.tokenizer is not None
    expected_text = text_features(exact, TINY, reward.encoder.tokenizer(TEXTS))
    assert (reward.encoder.images(images).double() - expected_image).abs().max() < tolerance
    assert (reward.encoder.texts(TEXTS).double() - expected_text).abs().max() < tolerance
    scores = reward(images, prompts()[:4])
    assert (scores - (expected_image * expected_text[:4]).sum(dim=1)).abs().max() < tolerance
    assert expected_text.std(dim=0).max() > 0.01  # the texts differ, so the comparison says something


def test_full_size_names_and_shapes_without_weights() -> None:
    with torch.device("meta"):
        model = transformers.CLIPModel(clip_config(VIT_H_14))
        state = {name: torch.empty(shape) for name, shape in open_clip_shapes(VIT_H_14).items()}
    converted = convert_open_clip("meta", state, VIT_H_14)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: tuple(tensor.shape) for name, tensor in converted.items()} == wanted
    assert sum(math.prod(shape) for shape in open_clip_shapes(VIT_H_14).values()) == 986_109_441
    assert clip_config(VIT_H_14).text_config.eos_token_id == 49407
    assert clip_config(VIT_H_14).text_config.hidden_act == clip_config(VIT_H_14).vision_config.hidden_act == "gelu"


def test_one_wrong_tensor_is_named(files: tuple[Path, Path, dict[str, Tensor]]) -> None:
    _, _, state = files
    key = "visual.transformer.resblocks.1.attn.in_proj_weight"
    for change, named in (
        ({key: None}, key),
        ({"extra.weight": torch.zeros(1)}, "extra.weight"),
        ({key: state[key].T.contiguous()}, f"{key}: shape"),
    ):
        broken = {name: t for name, t in (state | change).items() if t is not None}
        with pytest.raises(InputError, match=named):
            convert_open_clip("broken", broken, TINY)
    assert convert_open_clip("ok", state | {"attn_mask": torch.zeros(1)}, TINY).keys()


def test_query_key_value_and_projections_land_where_they_belong(files: tuple[Path, Path, dict[str, Tensor]]) -> None:
    _, _, state = files
    converted = convert_open_clip("tiny", state, TINY)
    fused = state["transformer.resblocks.1.attn.in_proj_bias"]
    for i, name in enumerate("qkv"):
        part = converted[f"text_model.encoder.layers.1.self_attn.{name}_proj.bias"]
        assert torch.equal(part, fused[32 * i : 32 * (i + 1)])
    assert torch.equal(converted["visual_projection.weight"], state["visual.proj"].T)


def test_scores_do_not_depend_on_chunks_and_stay_with_their_prompts(
    files: tuple[Path, Path, dict[str, Tensor]],
) -> None:
    checkpoint, merges, _ = files
    images, texts = pictures(5), prompts()
    scores = HPSv21.load(checkpoint, merges, shape=TINY, dtype=torch.float64)(images, texts)
    small = HPSv21.load(checkpoint, merges, shape=TINY, dtype=torch.float64, chunk=2)(images, texts)
    assert (scores - small).abs().max() < FLOAT64
    order = [3, 0, 4, 1, 2]
    shuffled = HPSv21.load(checkpoint, merges, shape=TINY, dtype=torch.float64)(
        images[order], [texts[i] for i in order]
    )
    assert (scores[order] - shuffled).abs().max() < FLOAT64
    assert (scores - scores.flip(0)).abs().max() > 1e-3


def test_each_distinct_text_is_encoded_once(files: tuple[Path, Path, dict[str, Tensor]]) -> None:
    checkpoint, merges, _ = files
    encoder = HPSv21.load(checkpoint, merges, shape=TINY).encoder
    seen: list[list[str]] = []
    real = encoder.text_features
    encoder.text_features = lambda texts: seen.append(list(texts)) or real(texts)  # type: ignore[method-assign]
    rows = encoder.texts(["a cat", "a dog", "a cat", "a cat"])
    assert seen == [["a cat", "a dog"]]
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[1])


def test_version_tells_checkpoints_apart(tmp_path: Path, files: tuple[Path, Path, dict[str, Tensor]]) -> None:
    checkpoint, merges, state = files
    reward = HPSv21.load(checkpoint, merges, shape=TINY)
    assert reward.name == "hps_v2.1"
    assert reward.range == (-1.0, 1.0)
    assert reward.version.startswith(f"HPS_tiny.pt {fingerprint(checkpoint)}, transformers ")
    other = tmp_path / "other.pt"
    changed = dict(state)
    changed["visual.transformer.resblocks.0.mlp.c_fc.weight"] = changed[
        "visual.transformer.resblocks.0.mlp.c_fc.weight"
    ].clone()
    changed["visual.transformer.resblocks.0.mlp.c_fc.weight"][0, 0] += 1e-3
    torch.save({"state_dict": changed}, other)
    assert fingerprint(other) != fingerprint(checkpoint)


def test_checkpoints_are_found_on_disk_or_asked_for_on_the_hub(tmp_path: Path) -> None:
    checkpoint, _ = tiny_open_clip(tmp_path)
    asked = {}

    def download(**words: str) -> str:
        asked.update(words)
        return str(checkpoint)

    assert find_checkpoint("owner/name:weights.pt", download) == checkpoint
    assert asked == {"repo_id": "owner/name", "filename": "weights.pt"}
    assert find_checkpoint(checkpoint, download) == checkpoint
    with pytest.raises(InputError, match=r"checkpoint = '/nowhere/x\.pt'"):
        find_checkpoint("/nowhere/x.pt", download)


def test_a_checkpoint_may_be_safetensors_but_no_other_pickle(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    assert torch.equal(read_state_dict(tmp_path / "a.safetensors")["a"], torch.ones(2))
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(InputError, match=r"list\.pt"):
        read_state_dict(tmp_path / "list.pt")


def test_tokenizer_marks_cuts_and_pads(tmp_path: Path) -> None:
    pytest.importorskip("ftfy")
    tokens = load_tokenizer(write_merges(tmp_path), 16, "open_clip")
    start, end = TINY.vocab_size - 2, TINY.vocab_size - 1
    assert tokens.vocab_size == TINY.vocab_size
    assert tokens.end == end
    ids = tokens(["a red cat", "cat " * 40, ""])
    words = tokens.tokenizer.get_vocab()
    assert ids[0, :5].tolist() == [start, words["a</w>"], words["red</w>"], words["cat</w>"], end]
    assert ids[1].tolist() == [start] + [words["cat</w>"]] * 14 + [end]
    assert ids[2, :2].tolist() == [start, end]
    same = tokens(["A\n red   CAT", "a red cat", "&amp;amp; it’s", "& it's"])
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[2], same[3])
    plain = tokens(["<|endoftext|>", "<end_of_text>"])
    assert plain[0, 1] != end
    assert plain[1, 1] == end


def test_a_tokenizer_of_another_vocabulary_is_refused(
    files: tuple[Path, Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    checkpoint, _, _ = files
    short = tmp_path / "short.txt"
    short.write_text("header\na t</w>\n")
    with pytest.raises(InputError, match="tokenizer: entries"):
        HPSv21.load(checkpoint, short, shape=TINY)
    (tmp_path / "merges.json").write_text("{}")
    with pytest.raises(InputError, match=r"merges\.json"):
        load_tokenizer(tmp_path / "merges.json")


def test_a_swapped_call_is_refused(files: tuple[Path, Path, dict[str, Tensor]]) -> None:
    checkpoint, merges, _ = files
    reward = HPSv21.load(checkpoint, merges, shape=TINY)
    with pytest.raises(InputError, match=r"samples\[0\]"):
        reward(pictures(1) * 255, [Prompt(0, "a cat")])
    with pytest.raises(InputError, match=r"len\(prompts\)"):
        reward(pictures(2), [Prompt(0, "a cat")])


def test_shapes_are_checked() -> None:
    with pytest.raises(InputError, match=r"open_clip\.vision_heads"):
        OpenClipShape(8, 28, 14, 48, 1, 5, 32, 1, 4)
    with pytest.raises(InputError, match=r"open_clip\.text_layers"):
        OpenClipShape(8, 28, 14, 48, 1, 3, 32, 0, 4)


def test_bfloat16_stays_near_float32(files: tuple[Path, Path, dict[str, Tensor]]) -> None:
    checkpoint, merges, _ = files
    full, low = (HPSv21.load(checkpoint, merges, shape=TINY, dtype=d) for d in (torch.float32, torch.bfloat16))
    images, texts = pictures(5), prompts()
    gap = (full(images, texts) - low(images, texts)).abs().max()
    # bfloat16 rounds to 2⁻⁹ and a score sums products of two unit vectors through two to three layers
    assert 0 < gap < 10 * 2.0**-9
    assert low(images, texts).dtype == torch.float64
