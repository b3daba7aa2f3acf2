"""Pacing: a set time for a block, computation that is already there taken off."""

from __future__ import annotations

import time

import pytest

from elasticd.messages import Pace
from elasticd.runtime.emulation import Pacer


def paced(pacer: Pacer, kind: str, tokens: int, share: float, communicated: float = 0.0) -> float:
    start = time.perf_counter()
    pacer(kind, tokens, share, start, communicated)
    return time.perf_counter() - start


def test_a_block_takes_seconds_by_tokens_share_and_rate() -> None:
    pacer = Pacer(Pace(forward=0.0002, backward=0.0004))
    assert 0.02 <= paced(pacer, "forward", 100, 1.0) < 0.2
    assert 0.04 <= paced(pacer, "backward", 100, 1.0) < 0.2
    pacer.pace = Pace(forward=0.0002, backward=0.0004, factor=3.0)
    assert 0.03 <= paced(pacer, "forward", 100, 0.5) < 0.2
    assert pacer.take() == (3, 0)
    assert pacer.take() == (0, 0)


def test_communication_comes_on_top() -> None:
    pacer = Pacer(Pace(forward=0.0002, backward=0.0004))
    start = time.perf_counter()
    pacer("forward", 100, 1.0, start, 0.05)  # as if 50 ms had gone into the TP group
    assert time.perf_counter() - start >= 0.07


def test_passes_in_a_row_end_by_the_table_however_late_each_wakes() -> None:
    pacer = Pacer(Pace(forward=0.001, backward=0.002))
    start = ended = time.perf_counter()
    for _ in range(20):
        ended = pacer("forward", 10, 0.5, ended, 0.0)
    assert ended - start == pytest.approx(0.1)
    late = time.perf_counter() - 1.0
    assert pacer("forward", 10, 0.5, late, 0.0) > late + 0.9, "an overrun ends when it is over"


def test_what_was_slept_too_long_is_not_stretched_once_more() -> None:
    pacer = Pacer(Pace(factor=3.0))
    start = time.perf_counter()
    ended = pacer("forward", 10, 1.0, start - 0.01, 0.0)
    assert start + 0.02 <= ended <= time.perf_counter()


def test_an_overrun_is_counted() -> None:
    pacer = Pacer(Pace(forward=1e-9, backward=1e-9))
    pacer("forward", 1, 1.0, time.perf_counter() - 0.01, 0.0)
    assert pacer.take() == (1, 1)


def test_without_a_table_a_slow_device_stretches_what_was_computed() -> None:
    pacer = Pacer(None)
    start = time.perf_counter() - 0.02
    pacer("forward", 100, 1.0, start, 0.0)
    assert time.perf_counter() - start < 0.04
    pacer.pace = Pace(factor=3.0)
    start = time.perf_counter() - 0.02
    pacer("forward", 100, 1.0, start, 0.0)
    assert time.perf_counter() - start >= 0.06
    assert pacer.take() == (0, 0)
