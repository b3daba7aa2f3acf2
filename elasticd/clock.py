"""Time as something handed in: a wall clock for daemons, a virtual one for tests and the simulator.

Decisions never read a clock; what drives them does, through this Protocol.  `call_at` exists because
some things must happen although nobody asks (a lease of the in-memory store expires): a wall clock
uses a timer thread for it, a virtual clock runs it inside `advance`.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Drop the call if it has not begun; harmless afterwards."""


class Clock(Protocol):
    """Seconds that never run backwards, with no meaning but their differences."""

    def now(self) -> float:
        """The present time in seconds."""
        ...

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` once, at `when` or soon after, on a thread of the clock's choice."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """As `Clock.now`, by `time.monotonic`: readings of two machines do not compare."""
        return time.monotonic()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """As `Clock.call_at`. The call runs on a daemon thread of its own, which does not keep the process
        alive."""
        timer = threading.Timer(max(0.0, when - self.now()), callback)
        timer.daemon = True
        timer.start()
        return timer


class Due:
    """A call that is due later, on a clock that runs by itself; `key`: its time, its priority, its place among
    the calls that were asked for."""

    __slots__ = ("callback", "cancelled", "key")

    def __init__(self, key: tuple[float, int, int], callback: Callable[[], None]) -> None:
        self.key = key
        self.callback = callback
        self.cancelled = False

    def __lt__(self, other: Due) -> bool:
        return self.key < other.key

    def cancel(self) -> None:
        """The clock passes over the call when its time comes. Harmless after the call was made."""
        self.cancelled = True


class VirtualClock:
    """A clock that stands still until it is advanced; calls that fall due run in order of time.

    Thread-safe.  Calls run on the thread that advances, outside the clock's lock, so that they may
    read the clock and schedule further calls; calls due at the same time run in the order they were made.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[Due] = []
        self._counter = itertools.count()
        self._lock = threading.Lock()

    def now(self) -> float:
        """As `Clock.now`: 0 until the first call. While a due call runs, it is the time at which the call was
        due."""
        return self._now

    def call_at(self, when: float, callback: Callable[[], None], priority: int = 0) -> Due:
        """As `Clock.call_at`; one whose time is past runs next. Of calls due at one time, those with a lower
        `priority` come first."""
        with self._lock:
            due = Due((max(when, self._now), priority, next(self._counter)), callback)
            heapq.heappush(self._due, due)
        return due

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`, running whatever falls due on the way at its own time.

        Raises ValueError for a negative amount.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds}) was asked for")
        target = self._now + seconds
        while (due := self._take_due(target)) is not None:
            due.callback()
        with self._lock:
            self._now = max(self._now, target)

    def _take_due(self, target: float) -> Due | None:
        """The next call that is due by `target`, at whose time it is now."""
        with self._lock:
            while self._due and self._due[0].key[0] <= target:
                due = heapq.heappop(self._due)
                if not due.cancelled:
                    self._now = max(self._now, due.key[0])
                    return due
        return None
