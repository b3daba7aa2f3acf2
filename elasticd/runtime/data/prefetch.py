"""Samples of a map-style dataset, read ahead of training in threads of their own.

Samples are known by their index alone, so a new plan invalidates nothing: what this device still needs stays as
it was read, and only the rest is let go.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol


class Dataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class SampleError(RuntimeError):
    """A sample could not be read; `index` names it. The cause is the dataset's own exception, on the rank that
    met it."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(f"sample {index} of the dataset could not be read: {why}")
        self.index = index


_Job = tuple[int, Future[Any]] | None


class Reader:
    """Reads what is wanted, in the order in which it is wanted.

    threads: how many read at once; with 0 the training thread reads when it needs a sample. One thread will do
    for datasets that are not thread-safe: then no other one reads."""

    def __init__(self, dataset: Dataset, threads: int = 1) -> None:
        self._dataset, self._threads = dataset, threads
        self._queue: SimpleQueue[_Job] = SimpleQueue()
        self._wanted: dict[int, Future[Any]] = {}
        self._started = False

    def want(self, indices: Iterable[int]) -> None:
        """What is needed from now on; all else is let go. Nothing is read twice that is wanted all the time."""
        if not self._threads:
            return
        wanted: dict[int, Future[Any]] = {}
        for index in indices:
            if index not in wanted:
                wanted[index] = self._wanted.pop(index) if index in self._wanted else self._ask(index)
        for future in self._wanted.values():
            future.cancel()
        self._wanted = wanted

    def take(self, index: int) -> Any:
        """The sample; it waits until it is read. Raises SampleError where the dataset raises."""
        try:
            if not self._threads:
                return self._dataset[index]
            if index not in self._wanted:
                self._wanted[index] = self._ask(index)
            return self._wanted[index].result()
        except Exception as error:
            raise SampleError(index, f"{type(error).__name__}: {error}") from error

    def _ask(self, index: int) -> Future[Any]:
        if not self._started:
            self._started = True
            for number in range(self._threads):
                threading.Thread(
                    target=_read,
                    args=(self._dataset, self._queue),
                    name=f"elasticd-reader-{number}",
                    daemon=True,
                ).start()
            weakref.finalize(self, _end, self._queue, self._threads)
        future: Future[Any] = Future()
        self._queue.put((index, future))
        return future


def _read(dataset: Dataset, queue: SimpleQueue[_Job]) -> None:
    while (job := queue.get()) is not None:
        index, future = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(dataset[index])
        except BaseException as error:
            future.set_exception(error)
        del job, future  # the sample is not to stay here


def _end(queue: SimpleQueue[_Job], threads: int) -> None:
    for _ in range(threads):
        queue.put(None)
