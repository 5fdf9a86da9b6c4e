"""Tokenizers of tiny pipelines, made of a few sentences without a network, the same in every process.

The trainers of word pieces number them in an order that differs from process to process; only the plain byte-pair
trainer, which Qwen's tokenizer needs, does not.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from branchgrpo.models.tiny.parts import library
from branchgrpo.reference.errors import ModelError

SENTENCES = (
    "a red cube on a table",
    "two green birds singing in the rain at night",
    "blue sky",
    "blurry, low quality",
    "0 1 2 3 4 5 6 7 8 9",
)
QWEN_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
CORPUS = (*SENTENCES, QWEN_TEMPLATE.replace("<|im_start|>", "").replace("<|im_end|>", ""))
QWEN_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_DROPPED = 34
"""Tokens of the prompt template that the Qwen-Image pipeline drops: a tokenizer must make as many of it."""


def trained(tokenizer: Any, trainer: object, corpus: Sequence[str] = CORPUS) -> dict[str, Any]:
    """The model part of a tokenizer trained on the corpus."""
    tokenizer.train_from_iterator(corpus, trainer)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def clip_tokenizer() -> Any:
    """A CLIPTokenizer for prompts of up to 16 tokens; its merges join the letters of the corpus's words."""
    from tokenizers import pre_tokenizers

    transformers = library("transformers")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(f"{letter}</w>" for letter in alphabet)]
    merges: dict[tuple[str, str], None] = {}
    for word in sorted(set(re.findall(r"[a-z]{2,}", " ".join(CORPUS).lower()))):
        left = word[0]
        for right in (*word[1:-1], f"{word[-1]}</w>"):
            merges[left, right] = None
            left += right
            vocab.append(left)
    ids = {piece: i for i, piece in enumerate(dict.fromkeys(vocab))}
    return transformers.CLIPTokenizer(vocab=ids, merges=list(merges), model_max_length=16)


def t5_tokenizer() -> Any:
    """A T5Tokenizer whose pieces are the corpus's words and characters."""
    transformers = library("transformers")
    words = sorted({f"▁{word}" for sentence in CORPUS for word in sentence.split()})
    letters = sorted({letter for sentence in CORPUS for letter in sentence if not letter.isspace()} | {"▁"})
    special = [(piece, 0.0) for piece in ("<pad>", "</s>", "<unk>")]
    pieces = [(word, -5.0) for word in words if len(word) > 2] + [(letter, -10.0) for letter in letters]
    return transformers.T5Tokenizer(vocab=[*special, *pieces], extra_ids=0, model_max_length=64)


def qwen_tokenizer() -> Any:
    """A Qwen2Tokenizer whose prompt template takes the tokens that the pipeline drops.

    Raises:
        ModelError: the template came out at another length.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    transformers = library("transformers")

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model = trained(tokenizer, trainer)
    vocab = dict(model["vocab"])
    vocab["<|endoftext|>"] = len(vocab)
    result = transformers.Qwen2Tokenizer(vocab=vocab, merges=[tuple(m) for m in model["merges"]])
    result.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    dropped = len(result(QWEN_TEMPLATE.split("{}")[0]).input_ids)
    if dropped != QWEN_DROPPED:
        raise ModelError("tokens of the prompt template", dropped, f"{QWEN_DROPPED}, which the pipeline drops")
    return result
