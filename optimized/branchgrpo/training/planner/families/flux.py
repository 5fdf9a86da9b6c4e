"""FLUX: blocks of two streams, then blocks of one (``FluxTransformer2DModel``)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from branchgrpo.training.planner.network import Attention, Kept, Linear, Network, Part, mlp, time_embedding


def double(width: int, heads: int, image: int, text: int) -> Part:
    """A block with weights of its own for image and text, and one attention over both.

    Kept a token when all weights are trained: input and output of both norms and the queries and keys before theirs
    (wide), inputs of three linear layers, q, k, v and the attention's output, that output again as the projection's
    input, what both gates scale, and twice the hidden layer. With adapters: no output of a norm, no gated value, no
    input of the frozen feed-forward network.
    """
    both = image + text
    layers: list[Linear] = []
    for stream, tokens, (q, k, v, out), forward in (
        ("norm1", image, ("to_q", "to_k", "to_v", "to_out.0"), "ff"),
        ("norm1_context", text, ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"), "ff_context"),
    ):
        layers.append(Linear(f"{stream}.linear", 1, width, 6 * width))
        layers += [Linear(f"attn.{name}", tokens, width, width) for name in (q, k, v, out)]
        layers += mlp(forward, tokens, width, 4 * width)
    statistics = both * (4 + 3 * heads)
    return Part(
        "double-stream block",
        tuple(layers),
        (Attention(both, both, width),),
        other=4 * (width // heads),
        full=Kept(17 * width * both, 6 * width * both, statistics),
        lora=Kept(10 * width * both, 4 * width * both, statistics),
        boundary=width * both,
    )


def single(width: int, heads: int, tokens: int) -> Part:
    """A block on both streams as one, attention and feed-forward side by side.

    Kept a token when all weights are trained: the norm's input and output, queries and keys before their norms (wide),
    the layers' input, the hidden layer, q, k, v and the attention's output, the five widths that the last layer reads,
    and what the gate scales.
    """
    layers = [
        Linear("norm.linear", 1, width, 3 * width),
        Linear("proj_mlp", tokens, width, 4 * width),
        Linear("proj_out", tokens, 5 * width, width),
        *(Linear(f"attn.{name}", tokens, width, width) for name in ("to_q", "to_k", "to_v")),
    ]
    statistics = tokens * (2 + 3 * heads)
    return Part(
        "single-stream block",
        tuple(layers),
        (Attention(tokens, tokens, width),),
        other=2 * (width // heads),
        full=Kept(15 * width * tokens, 4 * width * tokens, statistics),
        lora=Kept(9 * width * tokens, 3 * width * tokens, statistics),
        boundary=width * tokens,
    )


def flux(config: Mapping[str, Any], image: int, text: int) -> Network:
    """The network for one item.

    Args:
        config: of the transformer, as its ``config.json`` holds it.
        image: tokens of the latent.
        text: tokens of the prompt.
    """
    heads = config["num_attention_heads"]
    width, channels = heads * config["attention_head_dim"], config["in_channels"]
    out = config.get("out_channels") or channels
    patch = config.get("patch_size", 1)
    embedded = ("timestep", "guidance") if config.get("guidance_embeds") else ("timestep",)
    inputs = [
        Linear("x_embedder", image, channels, width, behind=False),
        Linear("context_embedder", text, config["joint_attention_dim"], width, behind=False),
        *(layer for name in embedded for layer in time_embedding(f"{name}_embedder", 256, width)),
        *time_embedding("text_embedder", config["pooled_projection_dim"], width),
    ]
    outputs = (
        Linear("norm_out.linear", 1, width, 2 * width),
        Linear("proj_out", image, width, patch * patch * out),
    )
    read = text * config["joint_attention_dim"] + image * channels
    return Network(
        (
            Part("embedders", tuple(inputs), full=Kept(read), block=False),
            replace(double(width, heads, image, text), count=config["num_layers"]),
            replace(single(width, heads, image + text), count=config["num_single_layers"]),
            Part(
                "output", outputs, full=Kept(width * image, 2 * width * image), lora=Kept(0, width * image), block=False
            ),
        )
    )
