"""The one clock of communication: seconds by what they were spent for."""

from __future__ import annotations

from time import perf_counter


class Stopwatch:
    """Seconds spent in communication, by what it was for; the only clock that communication keeps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def measure(self, label: str) -> Measure:
        """A context whose time counts for `label`."""
        return Measure(self, label)

    def read(self, label: str) -> float:
        return self.seconds.get(label, 0.0)

    def take(self) -> dict[str, float]:
        """All seconds since the last take."""
        seconds, self.seconds = self.seconds, {}
        return seconds


class Measure:
    """One use of a stopwatch."""

    __slots__ = ("_label", "_start", "_stopwatch")

    def __init__(self, stopwatch: Stopwatch, label: str) -> None:
        self._stopwatch, self._label = stopwatch, label

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = self._stopwatch.seconds
        seconds[self._label] = seconds.get(self._label, 0.0) + perf_counter() - self._start
