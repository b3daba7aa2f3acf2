"""Prefetching: samples of a map-style dataset are read ahead of training, in threads of their own.

A sample is known by its index alone, so a new plan invalidates nothing: samples that this device still needs
stay as they were read, and only the others are dropped. Two threads take the interpreter's lock from each other
with each operation, which costs more than it takes to read a sample that lies in memory: the training thread
reads those, when it needs them.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial
from math import inf
from operator import getitem
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from elasticd.runtime.model.rng import STATES, watching_thread
from elasticd.runtime.threads import DaemonThreads
from elasticd.system.user_line import described

log = logging.getLogger(__name__)

#: Reads of a reader are watched for draws: the first ones alone, while training waits to seed or restore its
#: generators, so that a draw is surely seen; more beside training, and then one of so many. It takes some 15
#: microseconds.
_ALONE, _WATCHED, _EVERY = 4, 16, 8
#: Seconds that reads by the training thread take at most, in the mean of all reads, and how many more at once.
_QUICK_SECONDS, _SPARE_SECONDS = 1e-4, 0.05


class Dataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class SamplePart(NamedTuple):
    """A part of a sample, which the dataset's method `part` gives."""

    sample: int  #: its index
    items: tuple[str, ...]  #: the kinds of items (images, say) that it has


#: A sample of a dataset by its index, or a part of one.
SampleKey = int | SamplePart


def index_of(key: SampleKey) -> int:
    """The index of the sample."""
    return key.sample if isinstance(key, SamplePart) else key


#: What may be wrong with a sample.
UNREAD, NO_ROW = "could not be read", "goes into no packed row"
NO_ROWS = "cannot be dealt"


class SampleError(RuntimeError):
    """A sample could not be read, or goes into no packed row. On the rank that tried to read it, the cause is
    the dataset's own exception."""

    def __init__(self, index: int, why: str, problem: str = UNREAD) -> None:
        super().__init__(f"sample {index} of the dataset {problem}: {why}")
        self.index, self.why, self.problem = index, why, problem


class NothingRead(RuntimeError):
    """A rank can read no sample of a micro-batch, nor another one that stands in for it: its passes cannot go
    on, and no other rank knows. The cause is the first `SampleError`."""


class SamplePrefetcher:
    """Reads samples in the order in which they are wanted, each once for each use.

    A dataset that draws from generators which the whole process shares (torch's, Python's, NumPy's) cannot be
    read beside training: blocks that draw, or are recomputed, would draw other numbers, and the dataset's own
    would repeat. So reads are watched, and once one has drawn the training thread reads all further samples,
    inside `ModelRng.keyed`.
    """

    #: Whether a sample is read by the thread that takes it.
    here: bool

    def __init__(self, dataset: Dataset, threads: int | DaemonThreads | None = 1) -> None:
        """
        Args:
            dataset: a map-style dataset.
            threads: that read at once: so many of its own, or those of `reading_threads`. 0 or None: the
                training thread reads a sample when it needs it.
        """
        self._dataset = dataset
        self._threads = reading_threads(threads) if isinstance(threads, int) else threads
        self.here = self._threads is None
        self._reads = 0
        self._judged = False  # a sample that was taken had been read alone
        self._left = _SPARE_SECONDS  # that reads by the training thread may take until others read again
        self._quickest = inf  # of the reads of the threads [s]
        self._wanted: dict[SampleKey, deque[Future[_Read]]] = {}

    def want(self, keys: Iterable[SampleKey]) -> None:
        """Reads these samples ahead, as often as they are named, and drops all others. What stays wanted is not
        read again."""
        if self.here:
            return
        wanted: dict[SampleKey, deque[Future[_Read]]] = defaultdict(deque)
        quick = self._is_quick
        for key in keys:
            ahead = self._wanted.get(key)
            if ahead or not quick:
                wanted[key].append(ahead.popleft() if ahead else self._ask(key))
        self._drop()
        self._wanted = wanted

    def take(self, key: SampleKey) -> Any:
        """Waits for a sample. Where `here` became true by it, it drew and is not this sample: take it again.

        Raises:
            SampleError: the dataset raised.
        """
        try:
            if self.here:
                return self._read(key)()
            ahead = self._wanted.get(key)
            read = self._read_quickly(key) if not ahead and self._is_quick else None
            if read is None:
                read = (ahead.popleft() if ahead else self._ask(key)).result()
                self._quickest = min(self._quickest, read.seconds)
                self._left = min(self._left + _QUICK_SECONDS, _SPARE_SECONDS)
            if read.drew or not (read.alone or self._judged):  # others draw, or seed, meanwhile
                read = self._ask(key, alone=True).result()
            self._judged = True
            if read.drew:
                self._read_here()
            return read.sample
        except Exception as error:
            raise SampleError(index_of(key), described(error)) from error

    def _read(self, key: SampleKey) -> Callable[[], Any]:
        """A function that reads a sample of the dataset."""
        if isinstance(key, SamplePart):
            return partial(self._dataset.part, *key)  # type: ignore[attr-defined]
        return partial(getitem, self._dataset, key)

    @property
    def _is_quick(self) -> bool:
        """True if the training thread reads what is not read ahead: enough samples were watched, and took no
        longer than it takes to hand one over."""
        return self._reads >= _WATCHED and self._quickest <= _QUICK_SECONDS and self._left > 0

    def _read_quickly(self, key: SampleKey) -> _Read | None:
        """Reads a sample in this thread. None: one of the others reads, perhaps of a dataset with the same
        file."""
        if self._threads is None or not self._threads.idle:
            return None
        self._reads += 1
        read = _watched(self._read(key), watch=self._reads % _EVERY == 0, alone=False)
        self._left = min(self._left + _QUICK_SECONDS - read.seconds, _SPARE_SECONDS)
        return read

    def _read_here(self) -> None:
        log.info(
            "the dataset draws from a generator that the whole process shares (torch's, Python's or NumPy's): "
            "its samples are not read ahead any more, and what it draws is a function of seed, step and index; "
            "to have them read ahead, make a generator in __getitem__, from the index"
        )
        self.here = True
        self._drop()

    def _drop(self) -> None:
        """Cancels what is still wanted. Before the training thread reads, waits for what is being read: the
        dataset may not be thread-safe."""
        for ahead in self._wanted.values():
            for future in ahead:
                if not future.cancel() and self.here:
                    wait([future])
        self._wanted = {}

    def _ask(self, key: SampleKey, *, alone: bool = False) -> Future[_Read]:
        assert self._threads is not None
        self._reads += 1
        alone = alone or self._reads <= _ALONE
        watch = alone or self._reads <= _WATCHED or self._reads % _EVERY == 0
        return self._threads(partial(_watched, self._read(key), watch=watch, alone=alone))


def reading_threads(count: int) -> DaemonThreads | None:
    """The threads that read the samples of all datasets of a job; None (for 0): the training thread reads. With
    one a dataset need not be thread-safe, nor what datasets share, as two parts of one file do."""
    return DaemonThreads("reader", count) if count else None


class _Read(NamedTuple):
    """A sample that was read."""

    sample: Any
    drew: bool  #: a generator moved meanwhile
    alone: bool  #: nobody seeded or restored one meanwhile, so that `drew` misses nothing
    seconds: float  #: that it took


def _watched(read: Callable[[], Any], *, watch: bool, alone: bool) -> _Read:
    began = perf_counter()
    if not watch:
        sample = read()
        return _Read(sample, drew=False, alone=False, seconds=perf_counter() - began)
    with STATES if alone else nullcontext(), watching_thread() as draws:
        began = perf_counter()
        sample = read()
        seconds = perf_counter() - began
    return _Read(sample, draws.drew, alone, seconds)
