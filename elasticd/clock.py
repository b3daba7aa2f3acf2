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


class VirtualClock:
    """A clock that stands still until it is advanced; calls that fall due run in order of time.

    Thread-safe.  Calls run on the thread that advances, outside the clock's lock, so that they may
    read the clock and schedule further calls; calls due at the same time run in the order they were made.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._due: list[_VirtualTimer] = []
        self._counter = itertools.count()
        self._lock = threading.Lock()

    def now(self) -> float:
        """As `Clock.now`: `start` until the first `advance`. While a due call runs, it is the time at which the
        call was due."""
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """As `Clock.call_at`. The call runs inside `advance`; one whose time is past runs in the next
        `advance`."""
        with self._lock:
            timer = _VirtualTimer(max(when, self._now), next(self._counter), callback)
            heapq.heappush(self._due, timer)
        return timer

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`, running whatever falls due on the way at its own time.

        Raises ValueError for a negative amount.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds}) was asked for")
        target = self._now + seconds
        while (timer := self._take_due(target)) is not None:
            timer.callback()
        with self._lock:
            self._now = max(self._now, target)

    def _take_due(self, target: float) -> _VirtualTimer | None:
        with self._lock:
            while self._due and self._due[0].when <= target:
                timer = heapq.heappop(self._due)
                if not timer.cancelled:
                    self._now = max(self._now, timer.when)
                    return timer
        return None


class _VirtualTimer:
    __slots__ = ("callback", "cancelled", "order", "when")

    def __init__(self, when: float, order: int, callback: Callable[[], None]) -> None:
        self.when = when
        self.order = order
        self.callback = callback
        self.cancelled = False

    def __lt__(self, other: _VirtualTimer) -> bool:
        return (self.when, self.order) < (other.when, other.order)

    def cancel(self) -> None:
        self.cancelled = True
