"""`JournalPages`: keeps a leader's journal in the store, and has it go on from what earlier leaders kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable

import msgspec

from elasticd.coordinator.events.event_log import EventLog, Lines
from elasticd.coordinator.events.event_pages import MOST_EVENTS, MOST_STEPS, Pages
from elasticd.coordinator.store_writer import Writer
from elasticd.trusted_time import ReadTimes

#: Seconds between looks at whether the journal has something new; how many looks until steps alone are written.
PAGE_SECONDS, STEPS_SELDOM = 1.0, 5


class JournalPages:
    """Writes a leader's journal in pages, in the gaps between other writes."""

    def __init__(
        self,
        journal: EventLog,
        clock: Callable[[], float],
        times: ReadTimes,
        writer: Callable[[], Writer | None],
    ) -> None:
        """
        Args:
            journal: of the leader.
            clock: monotonic seconds.
            times: those by which the leader takes over.
            writer: returns what writes to the store; None: nothing is kept.
        """
        self._journal, self._clock, self._times, self._writer = journal, clock, times, writer
        self._began = clock()
        self._pages: Pages | None = None

    @property
    def led_seconds(self) -> float:
        """Seconds since this leader began."""
        return self._clock() - self._began

    def stamp(self) -> tuple[float, float]:
        """Unix seconds by a clock that nobody sets, and that goes on from leader to leader; and the seconds for
        which leaders led, in all."""
        return self._times.stamp + self.led_seconds, self._times.led + self.led_seconds

    def restore(self, pages: Pages, kept: Iterable[Lines], jobs: Container[str]) -> None:
        """The journal goes on from what earlier leaders kept, and is kept in its turn. jobs: that are known."""
        for lines in kept:
            self._journal.restore(lines)
        self._journal.forget(*[job for job in self._journal.jobs if job not in jobs])
        self._pages = pages

    async def keeping(self) -> None:
        """Writes down what is new in the journal: events soon, steps alone less often."""
        rounds = 0
        while True:
            await asyncio.sleep(PAGE_SECONDS)
            rounds += 1
            if self._journal.new_events or rounds >= STEPS_SELDOM:
                rounds = 0
                self.write()

    def write(self) -> None:
        """Writes a page of the journal's new lines. It waits while something else is written: no decision is to
        wait for it."""
        writer = self._writer()
        if self._pages is None or writer is None or writer.busy:
            return
        lines = self._journal.new(MOST_EVENTS, MOST_STEPS)
        if lines is not None:
            stamp, led = self.stamp()
            lines = msgspec.structs.replace(lines, stamp=stamp, led=led)
            writer.put(self._pages.written(lines))

    def refused(self) -> None:
        """The store does not take the newest page."""
        if self._pages is not None:
            self._pages.refused()
