"""SD3 and Qwen-Image: every block has two streams and one attention over both."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from branchgrpo.training.planner.network import Attention, Kept, Linear, Network, Part, mlp, time_embedding


@dataclass(frozen=True)
class Block:
    """What distinguishes one block from another.

    Attributes:
        modulations: names of the two layers that make scales, shifts and gates, image first.
        forwards: names of the two feed-forward networks, image first.
        normed: whether queries and keys are normed, each head by itself.
        dual: whether the image has a second attention of its own.
        ends_text: ``no``; ``pruned``: the text's output has no layers; ``unread``: it has, and nothing reads them.
    """

    modulations: tuple[str, str]
    forwards: tuple[str, str]
    normed: bool
    dual: bool = False
    ends_text: str = "no"


def layers(kind: Block, width: int, image: int, text: int) -> list[Linear]:
    """Its linear layers."""
    read = kind.ends_text == "no"
    rows = 2 if kind.ends_text == "pruned" else 6
    found = [
        Linear(kind.modulations[0], 1, width, (9 if kind.dual else 6) * width),
        Linear(kind.modulations[1], 1, width, rows * width),
        *(Linear(f"attn.{name}", image, width, width) for name in ("to_q", "to_k", "to_v", "to_out.0")),
        *(Linear(f"attn.{name}", text, width, width) for name in ("add_k_proj", "add_v_proj")),
        Linear("attn.add_q_proj", text, width, width, adaptable=read),
        *mlp(kind.forwards[0], image, width, 4 * width),
    ]
    if kind.dual:
        found += [Linear(f"attn2.{name}", image, width, width) for name in ("to_q", "to_k", "to_v", "to_out.0")]
    if kind.ends_text != "pruned":
        found.append(Linear("attn.to_add_out", text, width, width, read=read))
        found += mlp(kind.forwards[1], text, width, 4 * width, read=read)
    return found


def block(kind: Block, width: int, heads: int, image: int, text: int) -> Part:
    """One block.

    Kept a token when all weights are trained: as in FLUX's block of two streams; a norm of queries and keys keeps its
    input, and what its weight scales. Text that ends here keeps what leads to keys and values only.
    """
    both, ends = image + text, kind.ends_text != "no"
    alive = image if ends else both
    attention, gates = 5 * both, alive
    full, wide = (both + attention + 10 * alive) * width + gates * width, (2 * both + 2 * alive) * width
    lora, lora_wide = (both + attention + 4 * alive) * width, (both + alive) * width
    if kind.normed:
        wide, lora_wide = wide + 4 * both * width, lora_wide + 2 * both * width
    if kind.dual:
        full, lora = full + 6 * image * width, lora + 5 * image * width
        wide, lora_wide = wide + 4 * image * width * kind.normed, lora_wide + 2 * image * width * kind.normed
    statistics = both * (4 + heads * (1 + 2 * kind.normed))
    head = width // heads
    attentions = (Attention(both, both, width), *([Attention(image, image, width)] if kind.dual else []))
    return Part(
        "joint block",
        tuple(layers(kind, width, image, text)),
        attentions,
        other=kind.normed * head * (4 + 2 * kind.dual),
        full=Kept(full, wide, statistics),
        lora=Kept(lora, lora_wide, statistics),
        boundary=width * both,
    )


def output(width: int, image: int, channels: int) -> Part:
    """The last norm and projection."""
    return Part(
        "output",
        (Linear("norm_out.linear", 1, width, 2 * width), Linear("proj_out", image, width, channels)),
        full=Kept(width * image, 2 * width * image),
        lora=Kept(0, width * image),
        block=False,
    )


def stable_diffusion_3(config: Mapping[str, Any], image: int, text: int) -> Network:
    """``SD3Transformer2DModel`` for one item; see ``flux`` for the arguments."""
    heads, patch = config["num_attention_heads"], config["patch_size"]
    width, channels = heads * config["attention_head_dim"], config["in_channels"]
    depth, dual = config["num_layers"], set(config.get("dual_attention_layers") or ())
    kind = Block(("norm1.linear", "norm1_context.linear"), ("ff", "ff_context"), bool(config.get("qk_norm")))
    inputs = (
        Linear("pos_embed.proj", image, channels * patch * patch, width, behind=False),
        Linear("context_embedder", text, config["joint_attention_dim"], config["caption_projection_dim"], behind=False),
        *time_embedding("timestep_embedder", 256, width),
        *time_embedding("text_embedder", config["pooled_projection_dim"], width),
    )
    inner = depth - 1
    doubled = len([layer for layer in dual if layer < inner])
    last = replace(kind, dual=inner in dual, ends_text="pruned")
    read = text * config["joint_attention_dim"] + image * channels * patch * patch
    return Network(
        (
            Part("embedders", inputs, full=Kept(read), block=False),
            replace(block(replace(kind, dual=True), width, heads, image, text), count=doubled, name="dual block"),
            replace(block(kind, width, heads, image, text), count=inner - doubled),
            replace(block(last, width, heads, image, text), name="last block"),
            output(width, image, patch * patch * (config.get("out_channels") or channels)),
        )
    )


def qwen_image(config: Mapping[str, Any], image: int, text: int) -> Network:
    """``QwenImageTransformer2DModel`` for one item; see ``flux`` for the arguments."""
    heads, patch = config["num_attention_heads"], config["patch_size"]
    width, channels, words = heads * config["attention_head_dim"], config["in_channels"], config["joint_attention_dim"]
    kind = Block(("img_mod.1", "txt_mod.1"), ("img_mlp", "txt_mlp"), normed=True)
    inputs = (
        Linear("img_in", image, channels, width, behind=False),
        Linear("txt_in", text, words, width),
        *time_embedding("timestep_embedder", 256, width),
    )
    return Network(
        (
            Part("embedders", inputs, other=words, full=Kept(3 * text * words + image * channels), block=False),
            replace(block(kind, width, heads, image, text), count=config["num_layers"] - 1),
            replace(block(replace(kind, ends_text="unread"), width, heads, image, text), name="last block"),
            output(width, image, patch * patch * (config.get("out_channels") or channels)),
        )
    )
