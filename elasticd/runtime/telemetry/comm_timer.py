"""The one clock of communication: seconds by what they were spent for."""

from __future__ import annotations

from time import perf_counter

from elasticd.runtime.telemetry.device_timer import DeviceTimer
from elasticd.runtime.telemetry.main_thread import MainThread
from elasticd.wire.main_thread import LABELS, OTHER

#: Communication inside of a section's computation: in its TP group, and with lanes that share sequences.
INSIDE = ("tensor", "context")


class Stopwatch:
    """Seconds spent in communication, by what it was for; the only clock that communication keeps. `marks`: of
    a device that says itself what its communication inside of sections took, when the host's clock does not.
    `where` is told of all that is measured, as its agent wants to know what the main thread is at.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.marks: DeviceTimer | None = None
        self.where = MainThread()

    def measure(self, label: str, rank: int | None = None) -> Measure:
        """A context whose time counts for `label`; `rank` of the plan is waited for, if it is one."""
        return Measure(self, label, rank)

    def read(self, label: str) -> float:
        """Seconds that were spent for `label` since the last `take`."""
        return self.seconds.get(label, 0.0)

    @property
    def inside(self) -> float:
        """Seconds since the last `take` that were spent inside of sections, see `INSIDE`."""
        if self.seconds.keys().isdisjoint(INSIDE):  # as on a device that communicates in no section
            return 0.0
        return sum([self.seconds.get(label, 0.0) for label in INSIDE])

    def take(self) -> dict[str, float]:
        """All seconds since the last take."""
        seconds, self.seconds = self.seconds, {}
        return seconds


class Measure:
    """One use of a stopwatch."""

    __slots__ = ("_label", "_marks", "_place", "_rank", "_start", "_stopwatch")

    def __init__(self, stopwatch: Stopwatch, label: str, rank: int | None = None) -> None:
        self._stopwatch, self._label, self._rank = stopwatch, label, rank
        self._marks = stopwatch.marks if label in INSIDE else None

    def __enter__(self) -> None:
        where = self._stopwatch.where
        self._place = where.place
        where.at(LABELS.get(self._label, OTHER), self._rank)
        if self._marks is not None:
            self._marks.begin(self._label)
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._stopwatch.where.at(self._place)
        if self._marks is not None:
            self._marks.end()
            return
        seconds = self._stopwatch.seconds
        seconds[self._label] = seconds.get(self._label, 0.0) + perf_counter() - self._start
