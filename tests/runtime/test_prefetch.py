"""Samples read ahead: each once for each use, in the order in which it is wanted, whatever the plan."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from elasticd.runtime.data.prefetch import SampleError, SamplePrefetcher, reading_threads
from elasticd.runtime.model.rng import kept_states, seed_all
from tests import forkserver

#: Seconds that a thread may take on a busy machine.
PATIENCE = 60


class Counting:
    """Counts reads; those of `slow` samples wait until they are let through."""

    def __init__(self, *slow: int) -> None:
        self.reads: list[int] = []
        self.slow, self.through = slow, threading.Event()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index in self.slow:
            assert self.through.wait(PATIENCE)
        self.reads.append(index)
        return -index


def test_what_is_wanted_is_read_before_it_is_taken() -> None:
    data = Counting(3)
    reader = SamplePrefetcher(data)
    reader.want([1, 2, 3])
    assert reader.take(2) == -2
    assert data.reads == [1, 2]
    data.through.set()
    assert [reader.take(i) for i in (1, 3)] == [-1, -3]
    assert data.reads == [1, 2, 3]


def test_another_plan_neither_repeats_what_it_still_needs_nor_reads_what_it_does_not() -> None:
    data = Counting(3)
    reader = SamplePrefetcher(data)
    reader.want([1, 2, 3, 4, 5])
    assert reader.take(2) == -2
    reader.want([5, 1, 3, 6])  # 4 was not begun, 3 is under way
    data.through.set()
    assert [reader.take(i) for i in (1, 3, 5, 6)] == [-1, -3, -5, -6]
    assert sorted(data.reads) == [1, 2, 3, 5, 6]


def test_each_use_of_a_sample_reads_it_once() -> None:
    data = Counting()
    reader = SamplePrefetcher(data)
    reader.want([1, 2, 1])
    assert [reader.take(i) for i in (1, 2, 1)] == [-1, -2, -1]
    assert data.reads == [1, 2, 1]
    assert reader.take(1) == -1
    assert data.reads == [1, 2, 1, 1]


def test_what_was_never_wanted_is_read_when_it_is_taken() -> None:
    assert SamplePrefetcher(Counting()).take(7) == -7
    assert SamplePrefetcher(Counting(), threads=0).take(7) == -7


@pytest.mark.parametrize("threads", [0, 2])
def test_a_sample_that_raises_is_named(threads: int) -> None:
    reader = SamplePrefetcher([0, 1], threads)
    reader.want([1, 5])
    assert reader.take(1) == 1
    with pytest.raises(SampleError, match="sample 5 of the dataset could not be read: IndexError"):
        reader.take(5)


def test_threads_end_with_their_reader() -> None:
    others = set(threading.enumerate())  # of other tests, it may be
    reader = SamplePrefetcher(Counting())
    assert reader.take(1) == -1
    mine = [thread for thread in threading.enumerate() if thread not in others]
    assert [thread.name for thread in mine] == ["elasticd-reader-0"]
    del reader
    gc.collect()
    for thread in mine:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in mine)


class Timed:
    """Has the thread of each read, which takes so many seconds."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.readers: list[threading.Thread] = []
        self.seconds = seconds

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        self.readers.append(threading.current_thread())
        time.sleep(self.seconds) if self.seconds else None
        return -index


def taken(reader: SamplePrefetcher, indices: range) -> None:
    """Takes samples, each of which is wanted before."""
    for index in indices:
        reader.want([index, index + 1])
        assert reader.take(index) == -index


def test_samples_that_lie_in_memory_are_read_by_the_thread_that_takes_them() -> None:
    """Once some were watched: to hand one over takes longer."""
    here, data = threading.current_thread(), Timed()
    reader = SamplePrefetcher(data)
    taken(reader, range(40))
    assert here not in data.readers[:16]
    assert {*data.readers[20:]} == {here}
    assert not reader.here


def test_samples_that_take_long_are_read_ahead_also_after_quick_ones() -> None:
    here, data = threading.current_thread(), Timed(0.001)
    reader = SamplePrefetcher(data)
    taken(reader, range(40))
    assert here not in data.readers
    data.seconds = 0.0
    taken(reader, range(40, 50))
    data.seconds, data.readers = 0.02, []
    taken(reader, range(50, 60))
    assert 3 <= data.readers.count(here) <= 5, "until they have taken as long as all may"
    assert here not in data.readers[-4:]
    data.seconds = 0.0
    taken(reader, range(60, 700))
    assert data.readers[-1] is here, "they are quick again"


def test_a_quick_sample_is_read_by_no_other_thread_than_those_that_read_the_same_file_now() -> None:
    threads, held = reading_threads(1), Counting(1)
    data = Timed()
    quick, other = SamplePrefetcher(data, threads), SamplePrefetcher(held, threads)
    taken(quick, range(40))
    other.want([1])
    data.readers.clear()
    threading.Timer(0.1, held.through.set).start()
    assert quick.take(50) == -50
    assert threading.current_thread() not in data.readers, "it waited for the other read"
    assert quick.take(51) == -51
    assert data.readers[1:] == [threading.current_thread()]


class RandomSamples:
    """Draws from torch's generator; `readers` has the thread of each read."""

    def __init__(self) -> None:
        self.readers: list[threading.Thread] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> float:
        self.readers.append(threading.current_thread())
        return float(torch.rand(()))


def test_a_dataset_that_draws_is_found_by_its_first_sample_while_generators_are_seeded_and_restored() -> None:
    """A first pass of training seeds generators thousands of times while the first samples are read."""
    done, interval = threading.Event(), sys.getswitchinterval()

    def passes() -> None:
        while not done.is_set():
            with kept_states():
                seed_all(7)

    training = threading.Thread(target=passes)
    sys.setswitchinterval(1e-5)
    training.start()
    try:
        for _ in range(50):
            data = RandomSamples()
            reader = SamplePrefetcher(data)
            reader.take(3)
            assert reader.here
            # What this thread reads is keyed by its caller, who could not know it before.
            assert threading.current_thread() not in data.readers
    finally:
        done.set()
        training.join(PATIENCE)
        sys.setswitchinterval(interval)


def test_a_sample_that_is_taken_after_the_first_reads_is_judged_alone_before_any_other() -> None:
    """Samples of another plan had been read before it, beside threads that seed: they say nothing."""
    data = RandomSamples()
    reader = SamplePrefetcher(data)
    reader.want(range(50))
    done = threading.Event()

    def passes() -> None:
        while not done.is_set():
            with kept_states():
                seed_all(7)

    training = threading.Thread(target=passes)
    training.start()
    try:
        reader.take(40)
        assert reader.here
    finally:
        done.set()
        training.join(PATIENCE)


#: A script whose model takes the state of torch's generator, as torch.utils.checkpoint does for each call.
#: Before Python 3.12 garbage may be collected in there, and a finalizer gives the interpreter's lock away,
#: while torch keeps the generator's own lock.
KEEPS_STATES = """
import gc, time, torch
from elasticd.runtime.data.prefetch import SamplePrefetcher

class Waits(list):
    def __getitem__(self, index):
        time.sleep(0.001)
        return super().__getitem__(index)

gc.callbacks.append(lambda phase, info: time.sleep(0.02))
reader = SamplePrefetcher(Waits(range(200)))
reader.want(range(200))
usual = gc.get_threshold()
for _ in range(10):
    gc.set_threshold(1)
    torch.get_rng_state()
    gc.set_threshold(*usual)
assert [reader.take(index) for index in range(200)] == list(range(200))
"""


def test_reading_ahead_goes_on_beside_a_model_that_takes_the_state_of_torchs_generator(tmp_path: Path) -> None:
    script = tmp_path / "keeps_states.py"
    script.write_text(KEEPS_STATES)
    process = forkserver.start(script, environment=os.environ, output=tmp_path / "log")
    try:
        assert process.wait(PATIENCE) == 0, (tmp_path / "log").read_text()[-2000:]
    finally:
        process.kill()
