"""Lines that wait for one listener: bounded in bytes, and dropped together where it does not keep up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection


class LineQueue:
    """One listener's lines. All methods are called in one event loop.

    Args:
        most: Bytes that may wait.
    """

    lags: bool  #: lines were dropped: what waits is empty until the listener was told to begin anew
    woken: asyncio.Event  #: set where there is something to look at

    def __init__(self, most: int) -> None:
        self._most = most
        self.lines: deque[bytes] = deque()
        self.size = 0  # bytes
        self.lags = False
        self.woken = asyncio.Event()

    def put(self, lines: Collection[bytes]) -> None:
        """Has lines wait; drops all that wait where they are too many."""
        if self.lags:
            return
        self.lines.extend(lines)
        self.size += sum(map(len, lines))
        if self.size > self._most:
            self.lag()
        self.woken.set()

    def lag(self) -> None:
        """Drops what waits: the listener has to begin anew."""
        self.lines.clear()
        self.size, self.lags = 0, True
        self.woken.set()

    def take(self) -> bytes:
        """All that waits, as one piece."""
        taken = b"".join(self.lines)
        self.lines.clear()
        self.size = 0
        self.woken.clear()
        return taken
