"""Bytes that may be written to etcd, over time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticd.store.write_allowance import Allowance


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0, 10)), max_size=50))
def test_never_more_than_the_burst_and_the_rate_are_let_through(asked: list[tuple[int, float]]) -> None:
    allowance, now, taken = Allowance(burst=100, rate=5.0), 1000.0, 0
    for size, pause in asked:
        now += pause
        taken += size if allowance.take(size, now) else 0
        assert taken <= 100 + 5.0 * (now - 1000.0) + 1e-6


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0, 10)), max_size=50))
def test_who_waits_as_long_as_is_said_writes_no_more_than_the_rate(written: list[tuple[int, float]]) -> None:
    allowance, now = Allowance(burst=100, rate=5.0), 1000.0
    for size, pause in written:
        now += pause + allowance.wait(now + pause)
        assert allowance.wait(now) < 1e-6
        allowance.spend(min(size, 100), now)
    spent = sum(min(size, 100) for size, _ in written)
    assert spent <= 200 + 5.0 * (now - 1000.0) + 1e-6


def test_what_is_owed_is_bounded() -> None:
    allowance = Allowance(burst=100, rate=5.0)
    assert allowance.wait(1.0) == 0
    allowance.spend(1_000_000, 1.0)
    assert allowance.wait(1.0) == 20.0
    assert allowance.wait(21.0) == 0


def test_what_was_refused_is_taken_once_time_has_passed() -> None:
    allowance = Allowance(burst=100, rate=5.0)
    assert allowance.take(100, 7.0)
    assert not allowance.take(10, 8.0)
    assert allowance.take(10, 9.0)
    assert not allowance.take(101, 1e6)
