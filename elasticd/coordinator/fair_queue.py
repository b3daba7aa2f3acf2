"""The event loop's time, dealt among agents that all speak at the same moment.

A synchronous job's thousand agents report in the same few milliseconds. Each of them is handled in half a
millisecond, but asyncio runs all that is ready before it looks at its clock and its sockets again: pings, votes
of other jobs and users would wait for all of them. So what agents say waits in one line, and who works it off
lets everything else run after a slice of time.

What comes before a message is there, the parsing of bytes, is dealt by rounds of the loop (`RoundShare`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

#: Seconds of work after which the loop gets to do something else.
SLICE_SECONDS = 0.01

T = TypeVar("T")


class FairQueue:
    """One line of work, done in the order in which it came. Of one event loop."""

    def __init__(self, seconds: float = SLICE_SECONDS, clock: Callable[[], float] = time.perf_counter) -> None:
        self._slice, self._clock = seconds, clock
        self._line: deque[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = deque()
        self._working: asyncio.Task[None] | None = None

    async def take(self, work: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of the work once it is done, or raises its exception. Work whose caller was
        cancelled meanwhile is left out."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._line.append((work, done))
        if self._working is None:
            self._working = loop.create_task(self._work())
        return await done

    async def _work(self) -> None:
        ends = self._clock() + self._slice
        try:
            while self._line:
                work, done = self._line.popleft()
                if not done.done():
                    await _answered(work, done)
                if self._clock() >= ends:
                    await asyncio.sleep(0)
                    ends = self._clock() + self._slice
        finally:
            self._working = None
            while self._line:  # cancelled: nobody works any more
                self._line.popleft()[1].cancel()


class RoundShare:
    """A share of each round of the event loop, for work of many connections that is done part by part.

    While the share of a round lasts, a part is done at once. The rest waits in one line for the next rounds,
    and those whose work it is have their turns one part each: the loop is held up as long by many as by one.

    Args:
        seconds: in each round, for all together.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._seconds, self._clock = seconds, clock
        self._spent = 0.0  # seconds of this round
        self._line: deque[Callable[[], bool]] = deque()
        self._next: asyncio.Handle | None = None

    def do(self, part: Callable[[], bool]) -> None:
        """Calls `part` until it returns False: nothing more is to be done. `part` must not raise."""
        self._line.append(part)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._begin_round)
        self._work()

    def _begin_round(self) -> None:
        self._spent, self._next = 0.0, None
        if self._line:
            self._next = asyncio.get_running_loop().call_soon(self._begin_round)
            self._work()

    def _work(self) -> None:
        while self._line and self._spent < self._seconds:
            part = self._line.popleft()
            began = self._clock()
            if part():
                self._line.append(part)
            self._spent += self._clock() - began


async def _answered(work: Callable[[], Awaitable[T]], done: asyncio.Future[T]) -> None:
    try:
        answer = await work()
    except asyncio.CancelledError:
        done.cancel()
        raise
    except Exception as error:
        if not done.done():
            done.set_exception(error)
    else:
        if not done.done():
            done.set_result(answer)
