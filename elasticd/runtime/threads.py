"""Threads beside training that do not keep a process alive: `DaemonThreads` runs calls in their order.

A daemon thread that is in torch when the interpreter ends is unwound through C++ code that must not be,
and the process aborts (exit code 134). So the interpreter's exit waits for these threads, for `EXIT_SECONDS` at
most.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

log = logging.getLogger(__name__)

#: Seconds that the interpreter's exit waits for all threads that `start` has started.
EXIT_SECONDS = 3.0

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_owners: weakref.WeakSet[DaemonThreads] = weakref.WeakSet()

_Work = tuple[Callable[[], Any], Future[Any]] | None


class DaemonThreads:
    """Runs calls in daemon threads, in the order in which they came. The threads end with this object."""

    def __init__(self, name: str, count: int = 1) -> None:
        """
        Args:
            name: of the threads: "elasticd-NAME-0", "elasticd-NAME-1", ...
            count: threads that run at once.
        """
        self._name, self._count = name, count
        self._threads: list[threading.Thread] = []
        self._ended = False
        self._lock = threading.RLock()  # nothing is put behind the end; a finalizer may call in the midst
        self._queue: SimpleQueue[_Work] = SimpleQueue()
        self._last: weakref.ref[Future[Any]] | None = None

    @property
    def idle(self) -> bool:
        """True if the last call has ended; of one thread, all have."""
        last = self._last() if self._last is not None else None
        return last is None or last.done()

    def __call__(self, work: Callable[[], Any]) -> Future[Any]:
        """Has `work` called by a thread. The first call starts the threads.

        Returns:
            Its result. Cancel it to leave out a call that has not begun; after `end` it is cancelled.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._ended:
                future.cancel()
                return future
            if not self._threads:
                for number in range(self._count):
                    name = f"elasticd-{self._name}-{number}"
                    self._threads.append(start(partial(_run, self._queue), name))
                _owners.add(self)
                weakref.finalize(self, _end, self._queue, self._count)
            self._queue.put((work, future))
            self._last = weakref.ref(future)
        return future

    def run(self, work: Callable[[], None]) -> None:
        """Has `work` called by a thread. An exception, which nobody else would see, is logged."""
        self(partial(_logged, work))

    def end(self, seconds: float) -> None:
        """Drops the calls that have not begun, and waits for the others, `seconds` for each thread at most."""
        with self._lock:
            self._ended = True
            with suppress(Empty):
                while True:
                    if (item := self._queue.get_nowait()) is not None:
                        item[1].cancel()
            _end(self._queue, len(self._threads))
        for thread in self._threads:
            thread.join(seconds)


def start(target: Callable[[], object], name: str) -> threading.Thread:
    """Starts a daemon thread whose target comes to an end by itself."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    _started.add(thread)
    return thread


@atexit.register
def _exit() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for owner in [*_owners]:
        owner.end(0)
    for thread in [*_started]:
        thread.join(max(0.0, deadline - time.monotonic()))


def _run(queue: SimpleQueue[_Work]) -> None:
    while (item := queue.get()) is not None:
        work, future = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        del item, work, future  # while the thread waits it must not hold a sample


def _logged(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        log.exception("elasticd failed in a thread beside training")


def _end(queue: SimpleQueue[_Work], threads: int) -> None:
    for _ in range(threads):
        queue.put(None)
