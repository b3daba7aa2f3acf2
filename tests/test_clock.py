"""Clocks: the virtual one runs what is due in order, the wall clock on its own thread."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.clock import VirtualClock, WallClock


@given(st.lists(st.integers(0, 20), max_size=20))
def test_virtual_calls_run_in_order_of_time_then_of_making_and_see_their_own_time(times):
    clock, ran = VirtualClock(), []
    for number, when in enumerate(times):
        clock.call_at(when, lambda number=number, when=when: ran.append((clock.now(), when, number)))
    clock.advance(10)
    clock.advance(10)
    assert [(when, number) for _, when, number in ran] == sorted((w, n) for n, w in enumerate(times))
    assert all(now == when for now, when, _ in ran)
    assert clock.now() == 20


def test_a_call_made_by_a_call_runs_within_the_same_advance():
    clock, ran = VirtualClock(), []
    clock.call_at(1, lambda: clock.call_at(2, lambda: ran.append(clock.now())))
    clock.advance(5)
    assert ran == [2]


def test_a_cancelled_call_does_not_run():
    clock, ran = VirtualClock(), []
    clock.call_at(1, lambda: ran.append(1)).cancel()
    clock.advance(5)
    assert ran == []


def test_a_clock_cannot_go_back():
    with pytest.raises(ValueError, match="cannot go back"):
        VirtualClock().advance(-1)


def test_the_wall_clock_calls_when_it_is_time():
    clock, called = WallClock(), threading.Event()
    begun = clock.now()
    clock.call_at(begun + 0.05, called.set)
    assert called.wait(10)
    assert clock.now() >= begun + 0.05
