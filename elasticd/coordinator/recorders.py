"""Recordings of the leader's messages: each has a queue of lines, and is let go where it does not keep up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

from elasticd import recording
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.events import CoordinatorTick, Effect, Event

#: Lines that may wait for a recorder, and seconds after which an empty line says that nothing happened.
MOST_WAITING = 100_000
QUIET_SECONDS = 2.0
#: Who may record at once: each has the state and all that is heard in the leader's memory for a while.
MOST_RECORDERS = 4

_log = logging.getLogger(__name__)


class Recorders:
    """Nothing is made while nobody records."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[bytes | None]] = set()

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def full(self) -> bool:
        """True if as many record as may."""
        return len(self._queues) >= MOST_RECORDERS

    async def record(self, known: Callable[[], tuple[CoordinatorState, float]]) -> AsyncIterator[bytes]:
        """Lines from the state that is `known` now on, until this leader ends or the caller goes."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_WAITING)
        state, at = known()  # nothing is heard between here and the line below
        self._queues.add(queue)
        try:
            yield await asyncio.to_thread(recording.began, state, at, time.time())
            while True:
                try:
                    async with asyncio.timeout(QUIET_SECONDS):
                        line = await queue.get()
                except TimeoutError:
                    line = b"\n"
                if line is None:
                    return
                yield line
        finally:
            self._queues.discard(queue)

    def heard(self, event: Event, effects: Sequence[Effect], at: float, *, changed: bool) -> None:
        """Queues a message for all recordings. A line that cannot be written ends the recordings, not the
        leader."""
        if isinstance(event, CoordinatorTick) and not changed and not effects:
            return
        now = time.time()
        try:
            self._send(recording.heard(event, at, now))
            for note in recording.notes(effects):
                self._send(recording.told(note, at, now))
        except Exception:
            _log.exception("recordings are ended: %r cannot be written", event)
            self.close()

    def close(self) -> None:
        """All recordings end here."""
        for queue in list(self._queues):
            self._queues.discard(queue)
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    def _send(self, line: bytes) -> None:
        for queue in list(self._queues):
            if queue.qsize() >= MOST_WAITING - 1:
                _log.warning("a recording is ended: whoever makes it does not keep up")
                self._queues.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(line)
