"""The receiving end of a watch: a queue that blocks, or a sink that is called.

Three ways to read it:

- a thread:  `for item in watch: ...` ends when the watch is cancelled;
- a test:    `watch.get(timeout=5)` gives the next item, or None when none came in time;
- asyncio:   `store.watch(prefix, revision, asyncio_sink(queue))` fills an `asyncio.Queue`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticd.store.protocol import WatchItem

Sink = Callable[["WatchItem"], None]

_log = logging.getLogger(__name__)


class Watch:
    """What `Store.watch` returns: the store feeds it, whoever asked for it reads and cancels it."""

    def __init__(self, sink: Sink | None = None, on_cancel: Callable[[], None] | None = None) -> None:
        self._queue: queue.SimpleQueue[WatchItem | None] = queue.SimpleQueue()
        self._sink: Sink = sink if sink is not None else self._queue.put
        self._on_cancel = on_cancel
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def get(self, timeout: float | None = None) -> WatchItem | None:
        """The next item; None when the watch is cancelled or `timeout` seconds have passed."""
        if self.cancelled:
            return None
        with contextlib.suppress(queue.Empty):
            return self._queue.get(timeout=timeout)
        return None

    def __iter__(self) -> Iterator[WatchItem]:
        while (item := self.get()) is not None:
            yield item

    def cancel(self) -> None:
        """Stop. Nothing is delivered afterwards, except a call of the sink that is under way."""
        if self._cancelled.is_set():
            return
        self._cancelled.set()
        self._queue.put(None)
        if self._on_cancel is not None:
            self._on_cancel()

    def deliver(self, item: WatchItem) -> None:
        """For stores: hand one item over, unless the watch was cancelled."""
        if self.cancelled:
            return
        try:
            self._sink(item)
        except Exception:
            # One bad item must not cost the reader all that follow.
            _log.exception("a watch's sink failed on %r", item)

    def wait_cancelled(self, timeout: float) -> bool:
        """For stores: wait before trying again, but no longer than the watch is wanted."""
        return self._cancelled.wait(timeout)


def asyncio_sink(items: asyncio.Queue[WatchItem], loop: asyncio.AbstractEventLoop | None = None) -> Sink:
    """A sink that fills an unbounded queue of the running loop (or of `loop`) from the store's thread."""
    target = loop if loop is not None else asyncio.get_running_loop()

    def sink(item: WatchItem) -> None:
        # A loop that has closed has nobody left to read.
        with contextlib.suppress(RuntimeError):
            target.call_soon_threadsafe(items.put_nowait, item)

    return sink
