"""Who records what the leader hears: each has a queue of lines, and is let go where it does not keep up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence

from elasticd import recording
from elasticd.machines.coordinator import State
from elasticd.machines.job.effects import Effect, Event, Tick

#: Lines that may wait for a recorder, and seconds after which an empty line says that nothing happened.
MOST_WAITING = 100_000
QUIET_SECONDS = 2.0

_log = logging.getLogger(__name__)


class Recorders:
    """Nothing is made while nobody records."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[bytes | None]] = set()

    def __bool__(self) -> bool:
        return bool(self._queues)

    async def record(self, state: State, at: float) -> AsyncIterator[bytes]:
        """Lines from now on, until this leader ends or the caller goes."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_WAITING)
        queue.put_nowait(recording.began(state, at, time.time()))
        self._queues.add(queue)
        try:
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
        if isinstance(event, Tick) and not changed and not effects:
            return
        now = time.time()
        self._tell(recording.heard(event, at, now))
        for note in recording.notes(effects):
            self._tell(recording.told(note, at, now))

    def close(self) -> None:
        """All recordings end here."""
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    def _tell(self, line: bytes) -> None:
        for queue in list(self._queues):
            if queue.qsize() >= MOST_WAITING - 1:
                _log.warning("a recording is ended: whoever makes it does not keep up")
                self._queues.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(line)
