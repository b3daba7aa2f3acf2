"""The seconds of sections on a device that computes behind its host's back: by events, read once they are done.

An event is recorded into the device's queue where a section begins and ends, and where communication does
within it. Nothing waits: at the end of a step only events are read that the device has passed by then. It has
passed those of forward and backward passes, since the host waited for the vote; what it has not (the
optimizer's) is read a step later and counts there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from elasticd.runtime.accelerator import Accelerator, Event

#: Sections that may wait to be read: older ones are not counted.
MOST = 1 << 16


@dataclass(slots=True)
class _Span:
    """A section or a communication; `inside`: the communications within a section."""

    kind: str
    begin: Event
    end: Event
    inside: list[_Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.begin.elapsed_time(self.end) / 1e3


class DeviceTimer:
    """One device's. `make` makes an event; those that were read are used again."""

    def __init__(self, make: Callable[[], Event]) -> None:
        self._make = make
        self._free: list[Event] = []
        self._began: Event | None = None
        self._talk: tuple[str, Event] | None = None
        self._inside: list[_Span] = []
        self._done: deque[_Span] = deque(maxlen=MOST)

    def mark(self) -> None:
        """A section begins with what the host queues next. One that began and never ended counts for
        nothing."""
        for each in self._inside:
            self._free += (each.begin, each.end)
        self._inside = []
        if self._began is None:
            self._began = self._event()
        self._began.record()

    def passed(self, kind: str) -> None:
        """The section ends that began at the mark, and another begins."""
        assert self._began is not None
        span = _Span(kind, self._began, self._event(), self._inside)
        span.end.record()
        self._done.append(span)
        self._began, self._inside = None, []
        self.mark()

    def begin(self, kind: str) -> None:
        """A communication within a section begins."""
        self._talk = kind, self._event()
        self._talk[1].record()

    def end(self) -> None:
        """And ends."""
        if self._talk is not None:
            span = _Span(*self._talk, self._event())
            span.end.record()
            self._inside.append(span)
            self._talk = None

    def take(self) -> dict[str, float]:
        """Seconds by kind, of what the device has done since the last take: of sections without the
        communication in them, and of communication."""
        found: dict[str, float] = {}
        while self._done and self._done[0].end.query():
            span = self._done.popleft()
            spent = span.seconds
            for each in span.inside:
                spent -= each.seconds
                found[each.kind] = found.get(each.kind, 0.0) + each.seconds
            found[span.kind] = found.get(span.kind, 0.0) + max(0.0, spent)
            for each in (span, *span.inside):
                self._free += (each.begin, each.end)
        return found

    def _event(self) -> Event:
        return self._free.pop() if self._free else self._make()


def spans_of(accelerator: Accelerator) -> DeviceTimer | None:
    """Those of a device; None for processors, whose work is done when a call returns."""
    return None if accelerator.immediate else DeviceTimer(partial(accelerator.event, timing=True))
