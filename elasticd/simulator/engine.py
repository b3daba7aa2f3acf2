"""Events on a virtual clock: a heap keyed by time, priority and a counter, so that every run is the same run.

It is also the `Clock` of the in-memory store. Nothing here waits: time is that of the event being played.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

#: Of events due at one time, lower numbers come first: the script's faults before anything that meets them.
FAULT, NORMAL, LATE = 0, 1, 2


class Due:
    """A call that is due later."""

    __slots__ = ("callback", "cancelled", "key")

    def __init__(self, key: tuple[float, int, int], callback: Callable[[], None]) -> None:
        self.key = key
        self.callback = callback
        self.cancelled = False

    def __lt__(self, other: Due) -> bool:
        return self.key < other.key

    def cancel(self) -> None:
        """The engine passes over the call when its time comes. Harmless after the call was played."""
        self.cancelled = True


class EventEngine:
    """Plays calls in the order of (time, priority, order in which they were asked for)."""

    def __init__(self) -> None:
        self._now = 0.0
        self._heap: list[Due] = []
        self._counter = itertools.count()
        self.played = 0

    def now(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def call_at(self, when: float, callback: Callable[[], None], priority: int = NORMAL) -> Due:
        """Plays `callback` at `when`, or now if that is past."""
        due = Due((max(when, self._now), priority, next(self._counter)), callback)
        heapq.heappush(self._heap, due)
        return due

    def after(self, seconds: float, callback: Callable[[], None], priority: int = NORMAL) -> Due:
        """Plays `callback` so many seconds after the event that is being played. Of calls due at one time,
        those with a lower `priority` come first. The returned `Due` can be cancelled."""
        return self.call_at(self._now + seconds, callback, priority)

    def run(self, over: Callable[[], bool]) -> None:
        """Plays until `over` says so after an event, or until nothing is due any more."""
        while self._heap and not over():
            due = heapq.heappop(self._heap)
            if due.cancelled:
                continue
            self._now = due.key[0]
            self.played += 1
            due.callback()
