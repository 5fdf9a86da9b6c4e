"""The queue of states that wait for their velocity (spec: rollout)."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    """A contiguous range of states of one level that wait for their velocity."""

    level: int
    first: int
    last: int


class Frontier:
    """First-in, first-out queue of ready states, merged where they touch: continuous batching at a fixed capacity."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.queue: deque[Ready] = deque()

    def push(self, level: int, first: int, last: int) -> None:
        """Add a range."""
        if self.queue and self.queue[-1].level == level and self.queue[-1].last == first:
            first = self.queue.pop().first
        self.queue.append(Ready(level, first, last))

    def take(self) -> list[Ready]:
        """The next ranges, at most ``capacity`` items together; the last one is cut to fit."""
        if self.capacity is None:
            ranges = list(self.queue)
            self.queue.clear()
            return ranges
        ranges, room = [], self.capacity
        while self.queue and room > 0:
            head = self.queue.popleft()
            cut = min(head.last, head.first + room)
            if cut < head.last:
                self.queue.appendleft(Ready(head.level, cut, head.last))
            ranges.append(Ready(head.level, head.first, cut))
            room -= cut - head.first
        return ranges
