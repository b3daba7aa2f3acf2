"""Prefetching: samples of a map-style dataset are read ahead of training, in threads of their own.

A sample is known by its index alone, so a new plan invalidates nothing: samples that this device still needs
stay as they were read, and only the others are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from elasticd.runtime.threads import DaemonThreads


class Dataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


#: What may be wrong with a sample.
UNREAD, NO_ROW = "could not be read", "goes into no packed row"


class SampleError(RuntimeError):
    """A sample could not be read, or goes into no packed row. On the rank that tried to read it, the cause is
    the dataset's own exception."""

    def __init__(self, index: int, why: str, problem: str = UNREAD) -> None:
        super().__init__(f"sample {index} of the dataset {problem}: {why}")
        self.index, self.why, self.problem = index, why, problem


class SampleReader:
    """Reads samples in the order in which they are wanted."""

    def __init__(self, dataset: Dataset, threads: int = 1) -> None:
        """
        Args:
            dataset: a map-style dataset.
            threads: that read at once. With 1 the dataset need not be thread-safe; with 0 the training thread
                reads a sample when it needs it.
        """
        self._dataset = dataset
        self._threads = DaemonThreads("reader", threads) if threads else None
        self._wanted: dict[int, Future[Any]] = {}

    def want(self, indices: Iterable[int]) -> None:
        """Reads these samples ahead, and drops all others. A sample that stays wanted is not read again."""
        if self._threads is None:
            return
        wanted: dict[int, Future[Any]] = {}
        for index in indices:
            if index not in wanted:
                wanted[index] = self._wanted.pop(index) if index in self._wanted else self._ask(index)
        for future in self._wanted.values():
            future.cancel()
        self._wanted = wanted

    def take(self, index: int) -> Any:
        """Waits for a sample.

        Raises:
            SampleError: the dataset raised.
        """
        try:
            if self._threads is None:
                return self._dataset[index]
            if index not in self._wanted:
                self._wanted[index] = self._ask(index)
            return self._wanted[index].result()
        except Exception as error:
            raise SampleError(index, f"{type(error).__name__}: {error}") from error

    def _ask(self, index: int) -> Future[Any]:
        assert self._threads is not None
        return self._threads(partial(self._dataset.__getitem__, index))
