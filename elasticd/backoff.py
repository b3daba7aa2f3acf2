"""Seconds to wait between two attempts, with jitter: those that lost a peer together do not return together.

    pause = Backoff(0.05, 2.0)
    while not connected():
        time.sleep(pause.next())        # 0.025 to 0.05 s, then twice that, and so on up to 1 to 2 s
    pause.reset()

Standard library only: a trainer imports this. It draws from the machine and not from `random`, whose state is
the user's and is the same in processes that were seeded alike.
"""

from __future__ import annotations

from collections.abc import Callable
from random import SystemRandom

#: The least part of a wait that is drawn.
LEAST = 0.5
_draw = SystemRandom().random


def jittered(seconds: float, draw: Callable[[], float] = _draw) -> float:
    """Between half of it and all of it; `draw` gives numbers from 0 to 1."""
    return seconds * (LEAST + (1 - LEAST) * draw())


class Backoff:
    """Jittered seconds, doubled from `first` to `most` (default: always `first`)."""

    def __init__(self, first: float, most: float | None = None, draw: Callable[[], float] = _draw) -> None:
        self._first, self._most, self._draw = first, first if most is None else most, draw
        self._seconds = first

    def next(self) -> float:
        """The wait before the next attempt."""
        seconds, self._seconds = self._seconds, min(2 * self._seconds, self._most)
        return jittered(seconds, self._draw)

    def reset(self) -> None:
        """An attempt succeeded: the waits begin anew."""
        self._seconds = self._first
