"""Trying again: exponential back-off with jitter, bounded in number and time."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from branchgrpo.reference.errors import OptionError, is_integer
from branchgrpo.rewards.endpoint import EndpointFailure

Result = TypeVar("Result")
Sleep = Callable[[float], None]


@dataclass(frozen=True)
class Retry:
    """How often and how patiently.

    The wait before attempt k + 1 (k = 1, 2, …) is u · min(cap, base · 2^(k−1)) with u uniform on [½, 1], or what the
    server asked for if that is longer, up to the cap.

    Attributes:
        attempts: in all, ≥ 1; 1 fails at the first fault.
        base_s: first wait, ≥ 0.
        cap_s: longest wait, ≥ base_s.
    """

    attempts: int = 4
    base_s: float = 0.5
    cap_s: float = 20.0

    def __post_init__(self) -> None:
        if not is_integer(self.attempts) or self.attempts < 1:
            raise OptionError("retry.attempts", self.attempts, "an integer ≥ 1")
        if not 0.0 <= self.base_s <= self.cap_s:
            raise OptionError("retry.(base_s, cap_s)", (self.base_s, self.cap_s), "0 ≤ base_s ≤ cap_s")

    def wait(self, attempt: int, asked_s: float | None, rng: random.Random) -> float:
        """Seconds to wait after failed attempt ``attempt`` ≥ 1."""
        backoff = min(self.cap_s, self.base_s * 2.0 ** (attempt - 1)) * rng.uniform(0.5, 1.0)
        return backoff if asked_s is None else max(backoff, min(asked_s, self.cap_s))

    def run(self, request: Callable[[], Result], rng: random.Random, sleep: Sleep = time.sleep) -> Result:
        """The first result.

        Args:
            request: one attempt.
            rng: for the jitter.
            sleep: waits.

        Raises:
            EndpointFailure: the last failure, with the number of attempts; at once if it is not retryable.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return request()
            except EndpointFailure as failure:
                if not failure.retryable or attempt == self.attempts:
                    reason = f"{failure.reason} (attempt {attempt} of {self.attempts})"
                    raise EndpointFailure(reason, failure.retryable) from failure
                sleep(self.wait(attempt, failure.wait_s, rng))
        raise AssertionError("attempts ≥ 1")
