"""Writes where the main thread is into memory that the agent reads (`elasticd.wire.main_thread`)."""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
from collections.abc import Iterator
from functools import lru_cache
from time import perf_counter

from elasticd.wire.main_thread import CHANGE, COMPUTES, MAGIC, SCRIPT, STACK

#: What is left after a step of the weight that the slowest one before it has, and the longest stay at a place.
_FADING = 0.9
#: The count of changes, where it is in its word, from which it begins anew: half of what it can be.
_MOST_CHANGES = CHANGE << 30


class MainThread:
    """The main thread's position. This base discards it."""

    place = SCRIPT

    def at(self, place: int, rank: int | None = None) -> None:
        """It is there now; in a wait, for this rank. The place is kept, so that `during` can restore it."""
        self.place = place

    def begin(self, step: int, plan: int) -> None:
        """A step of a plan begins. How long one takes under another plan is not known from those before."""

    def end(self, seconds: float | None) -> None:
        """It ended, and took so long (None: it failed)."""

    def task(self, number: int) -> None:
        """A task of all members begins between two steps, by its place in `TASKS`; -1: it ended."""


@contextlib.contextmanager
def during(where: MainThread, place: int) -> Iterator[None]:
    """It is there meanwhile, and afterwards where it was."""
    before = where.place
    where.at(place)
    try:
        yield
    finally:
        where.at(before)


@contextlib.contextmanager
def during_task(where: MainThread, number: int) -> Iterator[None]:
    """A task of all members is under way meanwhile, by its place in `TASKS`."""
    where.task(number)
    try:
        yield
    finally:
        where.task(-1)


@contextlib.contextmanager
def during_step(where: MainThread, step: int, plan: int) -> Iterator[None]:
    """A step of a plan is trained meanwhile. A step that fails says nothing of how long one takes."""
    began, seconds = perf_counter(), None
    where.begin(step, plan)
    try:
        yield
        seconds = perf_counter() - began
    finally:
        where.end(seconds)


class SharedMainThread(MainThread):
    """In a memory file. `fd`: the file, for the agent; `signal`: at which stacks are written into it, 0 where
    that cannot be had."""

    __slots__ = (
        *("_changes", "_longest", "_memory", "_plan", "_since", "_stay", "_steps", "_usual", "_words"),
        *("fd", "place", "signal"),
    )

    def __init__(self) -> None:
        self.place = SCRIPT
        self.fd = os.memfd_create("elasticd-where", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, STACK)
        os.lseek(self.fd, STACK, os.SEEK_SET)
        self._memory = mmap.mmap(self.fd, STACK)
        self._words = memoryview(self._memory).cast("q")
        self._words[0] = MAGIC
        self._changes = 0
        self._plan, self._steps, self._usual = 0, 0, 0.0
        self._since, self._longest, self._stay = perf_counter(), 0.0, 0.0
        self.signal = self._register()

    def _register(self) -> int:
        """The last of the real-time signals that nobody has a handler for: libraries count from the first."""
        for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1):
            if signal.getsignal(number) is signal.SIG_DFL:
                with contextlib.suppress(OSError, RuntimeError, ValueError):
                    faulthandler.register(number, file=self.fd, all_threads=True)
                    return number
        return 0

    def at(self, place: int, rank: int | None = None) -> None:
        """Writes the place with a new count of changes into one word, which the agent reads in one access."""
        now = perf_counter()
        if self.place in COMPUTES and now - self._since > self._longest:
            self._longest = now - self._since
        self.place, self._since = place, now
        self._changes = changes = self._changes + CHANGE
        self._words[2] = changes | place if rank is None else changes | (rank + 1) << 8 | place

    def begin(self, step: int, plan: int) -> None:
        """Writes the step, and forgets how long one usually takes if the plan is another."""
        if plan != self._plan:
            self._plan, self._steps, self._usual, self._stay = plan, 0, 0.0, 0.0
            self._words[3] = self._words[4] = 0
        self._longest = 0.0
        self._words[1] = step + 1

    def task(self, number: int) -> None:
        """Writes it in the place of the step."""
        self._words[1] = -(number + 1)
        self.at(self.place)

    def end(self, seconds: float | None) -> None:
        """The first step of a plan has the cost of all that is done once, and tells nothing."""
        if self._changes >= _MOST_CHANGES:
            self._changes = 0
        self.at(SCRIPT)
        self._words[1] = 0
        if seconds is None:
            return
        self._steps += 1
        if self._steps > 1:
            self._usual = max(seconds, _FADING * self._usual)
            self._stay = max(self._longest, _FADING * self._stay)
            self._words[3], self._words[4] = int(self._usual * 1e6), int(self._stay * 1e6)


def shared() -> SharedMainThread:
    """This process's: a handler of a signal, and what it writes to, stay as long as the process does."""
    return _of(os.getpid())


@lru_cache(maxsize=1)
def _of(pid: int) -> SharedMainThread:
    return SharedMainThread()
