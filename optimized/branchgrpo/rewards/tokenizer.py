"""CLIP's tokenizer from local files: a folder or hub id of transformers, or open_clip's own vocabulary file."""

import gzip
import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Int64
from torch import Tensor

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.options import check_choice
from branchgrpo.rewards.extras import require

Cleaning = Literal["open_clip", "plain"]
BYTES_AND_SPECIALS = 256 + 256 + 2
"""Entries of a CLIP vocabulary that are not merges: bytes, bytes that end a word, start and end of text."""

MERGES = 49152 - 256 - 2
"""Merges that CLIP takes from its vocabulary file, which holds more (its vocabulary is 49,408)."""


class ClipTokenizer:
    """Texts to token ids: start, at most ``length`` − 2 tokens, end, padding.

    Attributes:
        length: tokens a text, padded or cut with the end token kept.
        cleaning: ``open_clip`` mends encoding faults and curly quotes (ftfy) and resolves HTML entities, as open_clip
            and HPS do; ``plain`` leaves the text to the tokenizer, as transformers' processors do.
    """

    def __init__(self, tokenizer: Any, length: int, cleaning: Cleaning = "plain") -> None:
        check_choice("tokenizer.cleaning", cleaning, get_args(Cleaning))
        self.tokenizer = tokenizer
        self.length = length
        self.cleaning = cleaning

    @property
    def vocab_size(self) -> int:
        """Number of entries, the special tokens among them."""
        return len(self.tokenizer)

    @property
    def end(self) -> int:
        """Id of the end token, at which the text feature is read."""
        return int(self.tokenizer.eos_token_id)

    def __call__(self, texts: Sequence[str]) -> Int64[Tensor, "items length"]:
        """Token ids, one row a text."""
        cleaned = [clean(text) if self.cleaning == "open_clip" else text for text in texts]
        encoded = self.tokenizer(cleaned, padding="max_length", truncation=True, max_length=self.length)
        return torch.tensor(encoded["input_ids"], dtype=torch.int64)


def clean(text: str) -> str:
    """Mend the encoding, resolve HTML entities twice, and collapse white space, as open_clip does before it tokenises.

    open_clip spells its marks ``<start_of_text>`` and ``<end_of_text>``: these are marks in a prompt too, while
    transformers' spelling of them is plain text, which the blanks here keep it.

    Raises:
        InputError: ftfy, which mends the encoding, is not installed.
    """
    mended = html.unescape(html.unescape(require("ftfy", "rewards").fix_text(text)))
    plain = re.sub(r"<\|(startoftext|endoftext)\|>", r"<| \1 |>", mended, flags=re.IGNORECASE)
    marks = re.sub(r"<(start|end)_of_text>", r"<|\1oftext|>", plain, flags=re.IGNORECASE)
    return re.sub(r"\s+", " ", marks.lower()).strip()


def load_tokenizer(source: str | Path, length: int = 77, cleaning: Cleaning = "plain") -> ClipTokenizer:
    """A tokenizer from open_clip's ``bpe_simple_vocab_16e6.txt.gz``, a folder, or a hub id of transformers.

    Raises:
        InputError: a file of another kind.
    """
    path = Path(source)
    if path.is_file():
        if not path.name.endswith((".txt.gz", ".txt")):
            raise InputError("tokenizer", path.name, "a BPE merges file (.txt or .txt.gz), a folder or a hub id")
        return ClipTokenizer(tokenizer_of_merges(path), length, cleaning)
    tokenizer = require("transformers", "rewards").AutoTokenizer.from_pretrained(str(source))
    return ClipTokenizer(tokenizer, length, cleaning)


def tokenizer_of_merges(path: Path) -> Any:
    """CLIP's byte-pair tokenizer from its list of merges: one header line, then one merge of two symbols a line."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    lines = content.decode("utf-8").split("\n")[1 : MERGES + 1]
    merges = [(first, second) for first, second in (line.split() for line in lines if line)]
    letters = byte_symbols()
    symbols = [*letters, *(f"{c}</w>" for c in letters), *("".join(merge) for merge in merges)]
    symbols += ["<|startoftext|>", "<|endoftext|>"]
    vocab = {symbol: index for index, symbol in enumerate(symbols)}
    return require("transformers", "rewards").CLIPTokenizer(vocab=vocab, merges=merges)


def byte_symbols() -> list[str]:
    """The printable stand-in of every byte, in the vocabulary's order: printable bytes first, then the others.

    A byte that has no printable Latin-1 character takes the next code point from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = 256 - len(printable)
    return [chr(code) for code in (*printable, *range(256, 256 + others))]
