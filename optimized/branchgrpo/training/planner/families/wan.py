"""Wan: self-attention over the video, cross-attention to the text (``WanTransformer3DModel``)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from branchgrpo.reference.errors import InputError
from branchgrpo.training.planner.network import Attention, Kept, Linear, Network, Part, mlp, time_embedding


def block(config: Mapping[str, Any], width: int, heads: int, video: int, text: int) -> Part:
    """One block.

    Kept a token when all weights are trained: inputs of the three norms and the outputs of the first and the third
    (wide), inputs of the layers, queries and keys before their norms (wide), q, k, v and the output of both attentions,
    what both gates scale (one wide), twice the hidden layer; a word's keys before their norm, keys and values.
    """
    hidden, crossed = config["ffn_dim"], bool(config.get("cross_attn_norm", True))
    layers = [
        *(Linear(f"attn1.{name}", video, width, width) for name in ("to_q", "to_k", "to_v", "to_out.0")),
        *(Linear(f"attn2.{name}", video, width, width) for name in ("to_q", "to_out.0")),
        *(Linear(f"attn2.{name}", text, width, width) for name in ("to_k", "to_v")),
        *mlp("ffn", video, width, hidden),
    ]
    statistics = video * (4 + 2 * crossed + 3 + 2 * heads) + text
    words = text * width
    return Part(
        "block",
        tuple(layers),
        (Attention(video, video, width), Attention(video, text, width)),
        other=(4 + 6 + 2 * crossed) * width,
        full=Kept(video * (10 * width + 2 * hidden) + 2 * words, (8 + crossed) * video * width + words, statistics),
        lora=Kept(video * (8 * width + hidden) + 2 * words, (5 + crossed) * video * width + words, statistics),
        boundary=width * video,
    )


def wan(config: Mapping[str, Any], video: int, text: int) -> Network:
    """The network for one item; see ``flux`` for the arguments.

    Raises:
        InputError: a network that sees an image beside the text: its tokens are not counted here.
    """
    if config.get("image_dim") or config.get("added_kv_proj_dim"):
        raise InputError("transformer.image_dim", config.get("image_dim"), "None: the planner counts text-to-video")
    heads, patch = config["num_attention_heads"], math.prod(config["patch_size"])
    width, channels = heads * config["attention_head_dim"], config["in_channels"]
    inputs = (
        Linear("patch_embedding", video, channels * patch, width, behind=False),
        *time_embedding("time_embedder", config["freq_dim"], width),
        Linear("time_proj", 1, width, 6 * width),
        Linear("text_embedder.linear_1", text, config["text_dim"], width, behind=False),
        Linear("text_embedder.linear_2", text, width, width),
    )
    read = text * (config["text_dim"] + 3 * width) + video * channels * patch
    out = (config.get("out_channels") or channels) * patch
    return Network(
        (
            Part("embedders", inputs, full=Kept(read), lora=Kept(text * width), block=False),
            replace(block(config, width, heads, video, text), count=config["num_layers"]),
            Part(
                "output",
                (Linear("proj_out", video, width, out),),
                other=2 * width,
                full=Kept(width * video, 2 * width * video),
                lora=Kept(0, width * video),
                block=False,
            ),
        )
    )
