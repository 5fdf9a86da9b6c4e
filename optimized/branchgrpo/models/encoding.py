"""Encoding prompts by a pipeline's own encoders, through the cache."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from branchgrpo.models.prompt_cache import PromptCache, cache_key
from branchgrpo.reference.errors import InputError

Encoder = Callable[[str], dict[str, Tensor]]
"""Encodes one text: named tensors, each with a first dimension of one item."""

LENGTH = "text_length"
"""Number of valid tokens, [items], kept on the CPU; the text tensors are zero from there on."""


def check_texts(name: str, texts: Sequence[str]) -> tuple[str, ...]:
    """Raise ``InputError`` unless every text is a string, and there is one at least."""
    if isinstance(texts, str) or not texts:
        raise InputError(name, texts, "a sequence of at least one text")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"{name}[{i}]", text, "a text")
    return tuple(texts)


def encode_texts(
    texts: Sequence[str],
    load_encoder: Callable[[], Encoder],
    cache: PromptCache | None,
    fingerprint: str,
    settings: dict[str, object],
) -> list[dict[str, Tensor]]:
    """The encoded texts, one dictionary each; the encoder is loaded only if the cache lacks one.

    Every text is encoded alone, so that an entry does not depend on the batch it was asked for in.
    """
    keys = {text: cache_key(fingerprint, text, settings) for text in texts}
    found = {text: cache.get(keys[text]) if cache else None for text in keys}
    encoder: Encoder | None = None
    for text in [text for text, entry in found.items() if entry is None]:
        encoder = encoder or load_encoder()
        with torch.no_grad():
            found[text] = encoder(text)
        if cache:
            cache.put(keys[text], found[text] or {}, text)
    return [found[text] or {} for text in texts]


def pad_tokens(tensor: Float[Tensor, "items tokens width"], length: int) -> Float[Tensor, "items longer width"]:
    """Append zero tokens up to a length."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, length - tensor.shape[1]))


def stack_items(entries: Sequence[dict[str, Tensor]], prefix: str = "") -> dict[str, Tensor]:
    """One batch of the entries; tensors of tokens that differ in length are padded and their lengths kept."""
    batch: dict[str, Tensor] = {}
    for name in entries[0]:
        tensors = [entry[name] for entry in entries]
        if tensors[0].ndim == 3:
            longest = max(t.shape[1] for t in tensors)
            tensors = [pad_tokens(t, longest) for t in tensors]
        batch[prefix + name] = torch.cat(tensors)
    return batch


def lengths(count: int) -> Int64[Tensor, "1"]:
    """The length entry of one item."""
    return torch.tensor([count], dtype=torch.int64)
