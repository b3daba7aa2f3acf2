"""Events on a virtual clock: a heap keyed by time, priority and a counter, so that every run is the same run.

It is also the `Clock` of the in-memory store. Nothing here waits: time is that of the event being played.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from elasticd.clock import Due, VirtualClock

#: Of events due at one time, lower numbers come first: the script's faults before anything that meets them.
FAULT, NORMAL, LATE = -1, 0, 1


class EventEngine(VirtualClock):
    """Plays calls in the order of (time, priority, order in which they were asked for)."""

    def after(self, seconds: float, callback: Callable[[], None], priority: int = NORMAL) -> Due:
        """Plays `callback` so many seconds after the event that is being played. Of calls due at one time,
        those with a lower `priority` come first. The returned `Due` can be cancelled."""
        return self.call_at(self._now + seconds, callback, priority)

    def run(self, over: Callable[[], bool]) -> None:
        """Plays until `over` says so after an event, or until nothing is due any more."""
        while self._due and not over():
            if (due := self._take_due(math.inf)) is not None:
                due.callback()
