"""The one clock of communication: seconds by what they were spent for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds spent in communication, by what it was for; the only clock that communication keeps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, label: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - start

    def read(self, label: str) -> float:
        return self.seconds.get(label, 0.0)

    def take(self) -> dict[str, float]:
        """All seconds since the last take."""
        seconds, self.seconds = self.seconds, {}
        return seconds
