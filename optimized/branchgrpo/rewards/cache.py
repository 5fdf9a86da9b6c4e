"""Scores remembered by content: the same sample, prompt and reward model are scored once."""

import hashlib
import math
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float64
from torch import Tensor

from branchgrpo.reference.errors import InputError
from branchgrpo.reference.protocols import Prompt, RewardModel
from branchgrpo.rewards.missing import MissingScores


def content_key(model: RewardModel, sample: Tensor, prompt: Prompt) -> str:
    """SHA-256 of the model's name and version, the prompt's text, and the sample's dtype, shape and bytes.

    The prompt's id is left out: it keys noise, not content.
    """
    flat = sample.detach().cpu().contiguous()
    header = repr((model.name, model.version, prompt.text, str(flat.dtype), tuple(flat.shape)))
    digest = hashlib.sha256(header.encode())
    digest.update(flat.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class ScoreCache:
    """Scores by content key, in memory or in an SQLite file that several runs may share."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.lock = threading.Lock()
        target = ":memory:" if path is None else str(path)
        self.database = sqlite3.connect(target, check_same_thread=False, timeout=30.0)
        with self.lock, self.database:
            self.database.execute("CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, value REAL NOT NULL)")

    def get(self, key: str) -> float | None:
        """The remembered score."""
        with self.lock:
            row = self.database.execute("SELECT value FROM scores WHERE key = ?", (key,)).fetchone()
        return None if row is None else float(row[0])

    def put(self, scores: dict[str, float]) -> None:
        """Remember finite scores; the others are not results."""
        rows = [(key, value) for key, value in scores.items() if math.isfinite(value)]
        with self.lock, self.database:
            self.database.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", rows)

    def __len__(self) -> int:
        with self.lock:
            return int(self.database.execute("SELECT COUNT(*) FROM scores").fetchone()[0])

    def close(self) -> None:
        """Close the file."""
        self.database.close()


class CachedReward:
    """A reward model that asks its cache first.

    Only for models whose score is a function of sample and prompt: a judge that samples its answers is frozen at its
    first one.  If some items of a call fail, the scores of the others are remembered before the error goes on, so a
    retried step asks for the missing ones alone.

    Attributes:
        hits, misses: items answered from the cache and by the model.
    """

    def __init__(self, model: RewardModel, cache: ScoreCache) -> None:
        self.model = model
        self.cache = cache
        self.name = model.name
        self.version = model.version
        self.range = model.range
        self.hits = 0
        self.misses = 0

    def __call__(self, samples: Tensor, prompts: Sequence[Prompt]) -> Float64[Tensor, "items"]:
        """Scores of all items; equal items of a call are scored once.

        Raises:
            MissingScores: as the model's, with the item numbers of this call.
        """
        if len(prompts) != len(samples):
            raise InputError("len(prompts)", len(prompts), f"{len(samples)}, one an item")
        keys = [content_key(self.model, sample, prompt) for sample, prompt in zip(samples, prompts, strict=True)]
        known = {key: value for key in keys if (value := self.cache.get(key)) is not None}
        first = {key: i for i, key in reversed(list(enumerate(keys))) if key not in known}
        self.hits += len(keys) - len(first)
        self.misses += len(first)
        reasons: dict[str, str] = {}
        if first:
            asked = sorted(first.values())
            fresh, failed = self.ask(samples[torch.tensor(asked, device=samples.device)], [prompts[i] for i in asked])
            scored = {keys[i]: value for i, value in zip(asked, fresh, strict=True)}
            reasons = {keys[asked[i]]: reason for i, reason in failed.items()}
            self.cache.put({key: value for key, value in scored.items() if key not in reasons})
            known |= scored
        scores = torch.tensor([known[key] for key in keys], dtype=torch.float64, device=samples.device)
        if reasons:
            items = {i: reasons[key] for i, key in enumerate(keys) if key in reasons}
            raise MissingScores(self.name, prompts, scores, items)
        return scores

    def ask(self, samples: Tensor, prompts: list[Prompt]) -> tuple[list[float], dict[int, str]]:
        """The model's scores and the reasons of those that are missing."""
        try:
            return self.model(samples, prompts).double().tolist(), {}
        except MissingScores as error:
            return error.scores.double().tolist(), error.reasons
